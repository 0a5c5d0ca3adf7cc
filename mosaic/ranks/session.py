"""A session on one of several ranks, and the plan that it ends with; all ranks take the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.calls.obstacles import Obstacle
from mosaic.engine.calls.signature import Arguments, Signature, learn
from mosaic.engine.finding.find import Finding, Sample, find_modules
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import Session, refuse_graphs_of_compiler
from mosaic.errors import UnsupportedModelError
from mosaic.find.restore import preserved
from mosaic.find.structure import flatten, map_tensors
from mosaic.profiler import ProfileCache, Subject
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import Template
from mosaic.ranks.parameters.tied import Holdings
from mosaic.ranks.rows.batched import rows_of
from mosaic.ranks.rows.sampler import Feed
from mosaic.ranks.world.groups import GroupLoan, check_place
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World, facts_of
from mosaic.take_turns import TrialReport, TrialSettings

RANK_TRIAL = TrialSettings(
    max_steps=60, max_lost_steps=30, steps_per_visit=2, warm_steps=1, rounds_to_win=5, max_plans=2
)
"""The default trial: short turns, and so many that one slow moment of the machine decides nothing."""


class RankPlan(PlacedPlan):
    """A plan that is ready to run on all ranks.

    Attributes:
        holdings: The ranks that hold each tensor of the model.
        feeds: Bytes of modules' rows.
        notes: Lines for ``describe()``.
    """

    holdings: Holdings
    feeds: tuple[Feed, ...]
    notes: tuple[str, ...]
    executor: RankExecutor


@dataclass(slots=True, kw_only=True)
class RankSession(Session):
    """A session on one of several ranks."""

    world: World
    cache: ProfileCache = field(default_factory=ProfileCache)
    """Measurements of this process."""
    batched: Mapping[str, tuple[bool, ...]] = field(init=False)
    """For each module, which of its arguments have a row for each sample."""
    learned: Mapping[str, tuple[Template, Signature]] = field(init=False)
    """For each module its result, and what its call showed."""
    placed: RankPlan = field(init=False)
    report: TrialReport = field(init=False)
    """Of the plans that were tried."""
    loan: GroupLoan = field(init=False)
    """The plan's communicators."""

    def find(self) -> None:
        """Finds the modules and examines their calls, and gives all ranks rank 0's weights.

        Raises:
            MosaicError: A rank cannot run the model, or ranks are not alike; on all ranks.
        """
        world, model = self.world, self.model
        world.run_on_all(self._find_here)
        world.check_alike(facts_of(self.request.backend.device, self.finding.graph))
        for tensor in (*model.parameters(), *model.buffers()):
            with world.progress.waiting(THE_LOOP, "agreement"):
                dist.broadcast(tensor.detach(), src=0, group=world.carrier_of(tensor))

    def _find_here(self) -> None:
        request, backend = self.request, self.request.backend
        check_place(self.model, backend.torch_device)
        self.finding, self.batched = find_with_rows(self.model, request.sample, request.modules, request.exclude)
        refuse_graphs_of_compiler(self.finding, backend)
        self.learned = {subject.name: self._learn(subject) for subject in self.finding.subjects}

    def _learn(self, subject: Subject) -> tuple[Template, Signature]:
        """Calls a module as in the sample's step."""
        settings = subject.settings if subject.settings is not None else nullcontext
        with preserved(self.model, alone=(subject,)), torch.enable_grad(), settings():
            arguments = Arguments.take(subject.args, subject.kwargs)
            call = learn(lambda: subject.module(*subject.args, **subject.kwargs), arguments, subject.module)
        return Template.of(call[0]), call[2]

    @property
    def trial_settings(self) -> TrialSettings | None:
        """The bounds of the trial; None where the plan runs untried."""
        trial, options = self.request.options.trial, self.request.options
        if trial != "auto":
            return trial
        return RANK_TRIAL if self.request.plan is None and options.method == "auto" else None


def find_with_rows(
    model: nn.Module, sample: Sample, modules: Sequence[str] | None = None, exclude: Sequence[str] = ()
) -> tuple[Finding, dict[str, tuple[bool, ...]]]:
    """Returns the modules, and for each which of its arguments have a row for each sample.

    Modules that share something with others are no obstacle here.

    Raises:
        UnsupportedModelError: A module cannot be split over ranks.
    """
    finding = find_modules(model, sample, include=modules, exclude=exclude, may_share=True)
    subjects, batched = [], {}
    for subject in map(_cut, finding.subjects):
        _refuse(subject, finding.local.get(subject.name))
        rows = batched[subject.name] = rows_of(subject)
        leaves = flatten((subject.args, subject.kwargs))[0]
        subjects.append(replace(subject, batch=len(leaves[rows.index(True)])))
    return replace(finding, subjects=tuple(subjects)), batched


def _cut(subject: Subject) -> Subject:
    """Cuts a module's inputs from the graph of the sample's step, which holds on to the parameters of others."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return replace(subject, args=map_tensors(cut, subject.args), kwargs=map_tensors(cut, subject.kwargs))


def _refuse(subject: Subject, obstacle: Obstacle | None) -> None:
    if obstacle is not None:
        raise UnsupportedModelError(
            f"{subject.name!r} cannot run on another rank than the one that calls it: {obstacle}; {obstacle.todo}. "
            f"colocate(..., exclude=[{subject.name!r}]) leaves it where it is called"
        )
    for path, part in subject.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UnsupportedModelError(
                f"{subject.name}{'.' if path else ''}{path} is a {type(part).__name__}: its statistics would be those "
                "of another batch than without Mosaic; use GroupNorm or LayerNorm, or leave the module where it is "
                f"called: colocate(..., exclude=[{subject.name!r}])"
            )
