"""Verification: repeats a day's steps from a checkpoint and compares losses and parameters bit by bit."""

from __future__ import annotations

import shutil
from dataclasses import replace

from mosaic.artifact import load
from mosaic.checkpoint.folder import checkpoints_in
from mosaic.checkpoint.methods import KeptModel
from mosaic.errors import MosaicError
from mosaic.lines import steps_in
from mosaic.retrain.worker.work import Work
from mosaic.train.day import Day
from mosaic.train.records import Trained
from mosaic.train.signals import StopRequests
from mosaic.train.worker_group import WorkerGroup


def verify(work: Work, group: WorkerGroup, stop: StopRequests, steps: int) -> str:
    """Repeats up to ``steps`` steps of a day from its oldest kept checkpoint; returns the result.

    Raises:
        MosaicError: No step can be repeated, or one differs; names the first.
    """
    oldest_first = list(reversed(checkpoints_in(work.day.checkpoints)))
    last = max(steps_in(work.day.metrics), default=0)
    if not oldest_first or oldest_first[0].step >= last:
        raise MosaicError(
            f"{work.day.path} keeps no checkpoint before its last step ({last}); lower save, or raise keep in [budget]"
        )
    first = oldest_first[0]
    to = min(first.step + steps, last)
    after = next((checkpoint for checkpoint in oldest_first if first.step < checkpoint.step <= to), None)
    if after is not None:
        to = max(checkpoint.step for checkpoint in oldest_first if checkpoint.step <= to)
    with group.shared_folder() as aside:
        checkpoints, metrics = aside / "checkpoints", aside / "metrics.jsonl"
        if group.rank == 0:
            shutil.copytree(first.path, checkpoints / first.path.name)
        settings = work.settings(group, None)
        settings = replace(
            settings,
            budget=replace(settings.budget, save="1000000h"),  # saves only at the end
            checkpoints=checkpoints,
            metrics=metrics if group.rank == 0 else None,
        )
        day = Day(work.program, work.samples(), settings, group)
        trained = day.train(stop, to=to)
        day.leave()
        return _compare(work, steps_in(metrics), trained, first.step, to)


def _compare(work: Work, again: dict[int, dict[str, object]], trained: Trained, first: int, to: int) -> str:
    before = steps_in(work.day.metrics)
    for step in range(first + 1, to + 1):
        if step in before and again[step]["loss"] != before[step]["loss"]:
            raise MosaicError(
                f"step {step} of {work.day.path.name} had the loss {before[step]['loss']} and has "
                f"{again[step]['loss']}: something is not as it was; see environment.json"
            )
    sentence = f"steps {first + 1} to {to} of {work.day.path.name} have the same losses to the last bit"
    expected = _digest_at(work, to)
    if expected is None:
        return f"{sentence}; no digest of step {to} is kept"
    if trained.digest != expected:
        raise MosaicError(f"{sentence}, and the parameters after step {to} differ: {trained.digest} is not {expected}")
    return f"{sentence}, and the parameters after step {to} too"


def _digest_at(work: Work, step: int) -> str | None:
    """Returns the digest of the parameters after a step, from the day's end or a checkpoint."""
    if work.day.trained.is_file():
        trained = load(Trained, work.day.trained)
        if trained.step == step:
            return trained.digest
    if all(checkpoint.step != step for checkpoint in checkpoints_in(work.day.checkpoints)):
        return None
    keeper = KeptModel(work.program.make_model())
    keeper.load(work.day.checkpoints, step=step)
    return keeper.digest()
