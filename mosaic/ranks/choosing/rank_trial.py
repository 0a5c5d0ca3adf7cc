"""Trying plans on all ranks before the loop begins, on the sample's step: forward, and backward of a made-up loss.

Plans take turns (``mosaic.ranks.choosing.contest``). For a turn a plan is made ready as it would be to run, but for
parameters: nobody gives any up yet. Its communicators stay there for the next turn and for the plan that wins. Nothing
is left of the steps: no optimizer takes one, and gradients, buffers and random numbers are put back as they were.

A step's time is that of the slowest rank, from when all were ready. A plan that cannot run on some rank, for want of
memory or whatever it raises, loses; that rank rings an ``Alarm``, so that no other one waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mosaic.backends.base import Backend
from mosaic.engine.calls.structure import tensors_in
from mosaic.engine.colocate import clock_of
from mosaic.engine.finding.find import Finding, Sample, runner_of
from mosaic.engine.handle import Handle
from mosaic.engine.trial.settings import StepClock, TrialSettings
from mosaic.errors import RankFailedError
from mosaic.plan import Plan
from mosaic.profiler import preserved
from mosaic.ranks.choosing.contest import Contest, Outcome, Turn
from mosaic.ranks.meeting.alarm import Alarm
from mosaic.ranks.meeting.world import World
from mosaic.ranks.running.activate import Activated, Examined, open_runs, place
from mosaic.ranks.running.tried import Tried

_LOG = logging.getLogger("mosaic")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSubject:
    """What plans are tried on."""

    model: nn.Module
    """The model, whole on every rank."""
    sample: Sample
    """This rank's batch."""
    finding: Finding
    """Its modules."""
    examined: Examined
    """What the sample showed beyond them."""
    direct: bool
    """Whether results may go straight."""


def try_plans(
    subject: TrialSubject, plans: Sequence[Plan], settings: TrialSettings, world: World, backend: Backend
) -> tuple[Plan, Tried]:
    """Returns the plan to run, and what was measured; every rank calls it with the same plans and gets the same.

    Args:
        subject: What to try them on.
        plans: The one to beat first.
        settings: Bounds.
        world: The ranks.
        backend: Where this rank runs.

    Raises:
        RankFailedError: Another rank has failed; names it.
    """
    names = [plan.search.method for plan in plans]
    contest = Contest(names, settings)
    with preserved(subject.model):
        trying = _Trying(subject, plans, settings.clock or clock_of(backend), world, backend)
        while isinstance(found := contest.next(), Turn):
            trying.take(found, contest)
    world.progress.calls = world.progress.step = 0
    world.progress.clear_waits()
    return plans[world.first_says(found.winner)], _tried(found)


class _Trying:
    """One trial: gives plans their turns."""

    def __init__(
        self, subject: TrialSubject, plans: Sequence[Plan], clock: StepClock, world: World, backend: Backend
    ) -> None:
        self._subject = subject
        self._plans = plans
        self._clock = clock
        self._world = world
        self._backend = backend
        self._run = runner_of(subject.model, subject.sample)
        self._num_turns = 0

    def take(self, turn: Turn, contest: Contest) -> None:
        """Gives a plan its turn; the contest is told of its times, or that it failed."""
        subject, world, plan = self._subject, self._world, self._plans[turn.plan]
        self._num_turns += 1
        opened, error = None, None
        try:
            opened = open_runs(
                subject.model, subject.finding, plan, world, self._backend, is_warm=self._num_turns > len(self._plans)
            )
        except Exception as failure:  # of any kind: all ranks have to hear of it
            error = failure
        failed = _said(world.tell(None if error is None else _text_of(error)))
        if failed is not None:
            if opened is not None:
                opened.runs.close()
            contest.fail(failed)
            return
        assert opened is not None
        world.max_ctas = plan.communication_sms or None
        with world.groups.lending() as loan:
            found = place(
                subject.model,
                subject.finding,
                plan,
                world,
                subject.examined,
                opened,
                direct=subject.direct,
                gives_up=False,
            )
        with Alarm(world.store, world.rank, f"trial/{self._num_turns}", loan.groups, world.progress) as alarm:
            failed = self._steps(found, turn.num_steps, contest, alarm)
        if failed is None:
            world.groups.give_back(loan)
        else:
            world.groups.destroy(loan)
            contest.fail(failed)

    def _steps(self, found: Activated, num_steps: int, contest: Contest, alarm: Alarm) -> str | None:
        """Takes steps until the turn is over; returns why the plan cannot run, or None."""
        model = self._subject.model
        handle = Handle(model, self._subject.finding, found.placed.plan, profile=None, notes=(), placed=found.placed)
        try:
            self._world.tell(None)  # so that the first step, too, begins with all ranks ready
            for _ in range(num_steps):
                took_ms, why = 0.0, None
                try:
                    took_ms = self._step(found)
                except RankFailedError:
                    raise
                except Exception as failure:  # of any kind: the plan loses, and all ranks have to hear of it
                    text = _text_of(failure)
                    why = text if alarm.ring(text) else None  # else this one failed since another did
                for parameter in model.parameters():
                    parameter.grad = None
                told = self._world.tell((took_ms, why))
                failed = _said([text for _, text in told])
                if failed is not None:
                    alarm.free()  # of what this rank may still be waiting for
                    return failed
                contest.note([ms for ms, _ in told])
                if contest.is_cut:
                    break
            return None
        finally:
            handle.remove()

    def _step(self, found: Activated) -> float:
        """Runs the sample's step; returns how long it took, in milliseconds."""
        start = self._clock.mark()
        with torch.enable_grad():
            made: Any = self._run()
            outputs = [tensor for tensor in tensors_in(made) if tensor.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        del made, outputs
        found.placed.executor.settle()
        end = self._clock.mark()
        self._clock.settle()
        return self._clock.ms_between(start, end)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _said(told: Sequence[str | None]) -> str | None:
    """Returns what ranks said that went wrong, by rank; None if nothing did."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None) or None


def _tried(found: Outcome) -> Tried:
    sentences = (
        f"trial: {found.reason} ({found.num_steps} steps of the sample before the loop, {found.lost_ms:.1f} ms)",
        *(one.sentence() for one in found.measured),
    )
    for line in sentences:
        _LOG.info(line)
    times = {f"trial_ms/{one.name}": one.median_ms for one in found.measured if one.median_ms is not None}
    metrics = {"trials": 1.0, "trial_steps": float(found.num_steps), "trial_lost_ms": found.lost_ms, **times}
    return Tried(sentences, metrics, ran=found.num_steps > 0)
