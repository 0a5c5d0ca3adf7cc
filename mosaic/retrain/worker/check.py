"""A rehearsal by day that finds errors of the night: takes a step, scores versions, keeps nothing."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

from mosaic.artifact import load
from mosaic.checkpoint.folder import check_room
from mosaic.checkpoint.methods import KeptModel
from mosaic.errors import MosaicError
from mosaic.retrain import arrivals, versions
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.folder import DayFolder, DayState
from mosaic.retrain.gate import margin_finding
from mosaic.retrain.worker.data import check_new_data, freeze
from mosaic.retrain.worker.score import frozen_rows, model_of, score_rows, weights_of
from mosaic.retrain.worker.work import Work
from mosaic.train.day import Day
from mosaic.train.worker_group import WorkerGroup

_STEPS = 4
"""Steps to take; the first is not timed."""


def check(work: Work, group: WorkerGroup) -> Iterator[str]:
    """Rehearses a small day in a temporary folder; yields its results, line by line.

    Raises:
        MosaicError: A step of the day would fail.
    """
    with group.shared_folder(work.folder.path, prefix=".check-") as aside:
        work = replace(work, day=DayFolder(aside / "day"))
        group.first_does(lambda: _rehearse(work))
        sources = work.sources
        rows = ", ".join(f"{record.name}: {record.rows} rows" for record in sources.sources)
        yield f"data: {rows}; {sources.num_steps} steps of {sources.batch}"
        check_new_data(work, group)
        data_check = load(DataCheck, work.day.data_check)
        yield from (f"data: {finding.sentence}" for finding in data_check.findings)
        if data_check.quarantine:
            yield f"this data would be QUARANTINED: {data_check.reason}"
        settings = work.settings(group, None)
        day = Day(work.program, work.samples(), settings, group)
        took = list(_timed(day))
        step_ms = statistics.median(took[1:])
        yield f"step: {step_ms:.1f} ms; a day takes about {sources.num_steps * step_ms / 60e3:.1f} min"
        yield from (f"plan: {line}" for line in day.plan.said.splitlines())
        size, count = day.checkpoint_bytes, settings.budget.keep + 2
        check_room(work.day.checkpoints, checkpoint_bytes=size, count=count, more_bytes=size)
        yield f"disk: there is room for {count} checkpoints of {size / 2**20:.1f} MiB, and the export"
        digest = day.handle.digest()
        day.export(work.day.model, None)
        if work.recipe.budget.ranks > 1 and not settings.budget.pipeline:
            day.check_for_ranks()
            yield f"ranks: its modules can be divided over {work.recipe.budget.ranks}"
        group.first_does(lambda: _read_back(work, digest))
        yield f"export: {work.day.model.stat().st_size / 2**20:.1f} MiB, read back equal"
        yield from _gate(work, group)
        yield from _hooks(work)


def _rehearse(work: Work) -> None:
    """Begins a day on the new data, or on the last day's."""
    ready = arrivals.ready_dates(work.folder, work.recipe)
    if not ready:
        new = work.recipe.sources.new
        raise MosaicError(
            f"no data is ready: there is no {new.path.replace('{day}', 'YYYY-MM-DD')}/{new.ready}; put a day's rows "
            "there, and that file last"
        )
    dates = arrivals.new_dates(work.folder, work.recipe) or ready[-1:]
    replay = tuple(date for date in arrivals.replay_dates(work.folder, work.recipe) if date not in dates)
    work.day.path.mkdir()
    work.day.set(
        DayState(
            day=max(dates),
            phase="prepared",
            new=dates,
            replay=replay,
            parent=versions.linked(work.folder, "champion"),
            champion=versions.linked(work.folder, "champion"),
            anchor=versions.linked(work.folder, "anchor"),
            began="",
            deadline=None,
            version="check",
        )
    )
    freeze(work)


def _timed(day: Day) -> Iterator[float]:
    for _ in range(_STEPS):
        began = time.perf_counter()
        day.try_step()
        yield (time.perf_counter() - began) * 1e3


def _read_back(work: Work, digest: str) -> None:
    again = KeptModel(work.program.make_model())
    again.load_weights(work.day.model)
    if again.digest() != digest:
        raise MosaicError("the exported weights, read back, are others; look for tensors that are made anew each time")


def _gate(work: Work, group: WorkerGroup) -> Iterator[str]:
    """Reports what the frozen rows can tell; refuses a margin below that."""
    gate, champion = work.recipe.gate, work.day.state.champion
    rows = frozen_rows(work)
    if not rows:
        raise MosaicError(f"there are no frozen rows in {work.recipe.sources.frozen}; put rows there to judge by")
    with model_of(work, weights_of(work, champion), group) as model:
        scores = score_rows(work, group, model, champion or "none", "frozen", rows)
    missing = [name for name in gate.slices if name not in scores.columns]
    if missing:
        raise MosaicError(f"[gate] slices names {missing[0]!r}, and score returns {', '.join(sorted(scores.columns))}")
    finding = margin_finding(scores, gate)
    yield f"gate: {finding.sentence}"
    if not finding.passed:
        raise MosaicError(finding.sentence)


def _hooks(work: Work) -> Iterator[str]:
    for command in work.recipe.promote.hooks:
        program = command.split()[0]
        if shutil.which(program) is None and not (work.folder.path / program).exists():
            raise MosaicError(
                f"hook {command!r}: there is no program {program}; give its path from the recipe's folder"
            )
        yield f"hook: {command}"
