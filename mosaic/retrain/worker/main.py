"""The worker process, which needs torch: checks a day's data, trains, and scores versions for the gate.

Run by the launcher as ``python -m mosaic.retrain.worker.main FOLDER DAY data train score``. Each part ends with
atomically written files, and is skipped if they exist. The parts ``check`` and ``verify`` rehearse a day and repeat
steps of one; both keep nothing.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from mosaic.artifact import check_writable, load, save, steps_in
from mosaic.checkpoint.checkpointer import Checkpointer
from mosaic.checkpoint.folder import checkpoints_in, sha256_of
from mosaic.errors import MosaicError
from mosaic.retrain import versions, workers
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.folder import DayFolder, Folder, load_if_intact, named_remedy, new_dates, ready_dates
from mosaic.retrain.gate import margin_finding
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import WINDOW_OVER, Trained
from mosaic.retrain.worker.data import freeze, frozen_rows
from mosaic.retrain.worker.loader import LoaderDiedError
from mosaic.retrain.worker.loop import WorkerGroup
from mosaic.retrain.worker.score import check_new_data, model_of, score_rows, score_versions
from mosaic.retrain.worker.train import Training
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import StopRequests

_LOG = logging.getLogger(__name__)
_CHECK_STEPS = 4
"""Steps that a check takes; the first is not timed."""


class _StopError(Exception):
    """Ends the worker with an exit code and a reason."""


def main() -> None:
    """Runs the parts on the command line, and exits with a code of ``mosaic.retrain.workers``."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("day")
    parser.add_argument("parts", nargs="+", choices=(*workers.PARTS, "check", "verify"))
    parser.add_argument("--error-file", type=Path, required=True)
    parser.add_argument("--train-until", type=float)  # of time.monotonic()
    parser.add_argument("--total-until", type=float)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    folder = Folder(arguments.folder)
    code, reason = workers.DONE, ""
    try:
        with named_remedy():
            _run(Work(folder, folder.day(arguments.day), read_recipe(folder.recipe)), arguments)
    except _StopError as stop:
        code, reason = stop.args
    except (torch.OutOfMemoryError, MemoryError) as error:
        code, reason = workers.OUT_OF_MEMORY, str(error)
    except LoaderDiedError as error:
        code, reason = workers.LOADER_DIED, str(error)
    except MosaicError as error:
        code, reason = workers.FAILED, str(error)
    except SystemExit as ended:  # the user's functions may call sys.exit
        code, reason = workers.FAILED, f"the program ended itself: sys.exit({ended.code!r})"
    except Exception as error:  # of any kind, from the user's functions; the report shows it
        _LOG.exception("the worker failed")
        code, reason = workers.FAILED, f"{type(error).__name__}: {error}"
    if code != workers.DONE:
        with suppress(OSError):  # the disk may be full; the exit code remains
            arguments.error_file.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(reason, encoding="utf-8")
    sys.stdout.flush()
    sys.exit(code)


def _run(work: Work, arguments: argparse.Namespace) -> None:
    stop = StopRequests()
    _use_repeatable_kernels(work.device)
    group = WorkerGroup(work.device)
    try:
        _do_parts(work, group, stop, arguments)
    except _StopError:
        group.leave()
        raise
    group.leave()


def _use_repeatable_kernels(device: torch.device) -> None:
    """Selects deterministic kernels; torch warns about operators without one."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # True would fill each uninitialized tensor: 620 times in a step of six transformer layers.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _do_parts(work: Work, group: WorkerGroup, stop: StopRequests, arguments: argparse.Namespace) -> None:
    """Does the parts of a task; several ranks only train, check and verify."""

    def check_time() -> None:
        if stop.received:
            raise _StopError(workers.INTERRUPTED, f"stopped by {stop.received}")
        if arguments.total_until is not None and time.monotonic() >= arguments.total_until:
            raise _StopError(workers.INTERRUPTED, "the window ended before the day was judged; the next run goes on")

    parts, day = arguments.parts, work.day
    if parts[0] in ("check", "verify"):
        aside = DayFolder(arguments.error_file.parent / day.path.name)  # the launcher removes it
        if parts[0] == "check":
            lines = _check(replace(work, day=aside), group)
        else:
            lines = _verify(work, aside, group, stop, arguments.steps)
        for line in lines:
            if group.rank == 0:
                print(line, flush=True)
    if "data" in parts:
        check_time()
        if not day.sources.is_file():
            freeze(work)
        if not day.data_check.is_file():
            check_new_data(work)
        data_check = load(DataCheck, day.data_check)
        if data_check.quarantine:
            raise _StopError(workers.QUARANTINED, data_check.reason)
    model = None
    if "train" in parts and not day.is_trained:
        model = _train(work, group, stop, arguments.train_until)
    if "score" in parts and not day.is_scored:
        score_versions(work, model, check_time)


def _train(work: Work, group: WorkerGroup, stop: StopRequests, until: float | None) -> nn.Module | None:
    training = Training(work, group, until)
    trained = training.train(stop)
    if trained.ended not in ("done", WINDOW_OVER):
        raise _StopError(workers.INTERRUPTED, f"stopped by {trained.ended} at step {trained.step}")
    if trained.step == 0:
        raise _StopError(workers.INTERRUPTED, "the window, less judging, ended before step 1; the next run retries")
    model = training.export(work.day.model, work.recipe.export)
    if group.rank == 0:
        save(replace(trained, sha256=sha256_of(work.day.model)), work.day.trained)
    return model


# Check and verify.


def _check(work: Work, group: WorkerGroup) -> Iterator[str]:
    """Rehearses a small day; yields its results, line by line."""
    check_writable(work.folder.path)
    yield from _check_data(work)
    training = Training(work, group)
    times_ms = []
    for _ in range(_CHECK_STEPS):
        began = time.perf_counter()
        training.try_step()
        times_ms.append((time.perf_counter() - began) * 1e3)
    step_ms = statistics.median(times_ms[1:])
    yield f"step: {step_ms:.1f} ms; a day takes about {work.sources.num_steps * step_ms / 60e3:.1f} min"
    yield from (f"plan: {line}" for line in training.plan.description.splitlines())
    digest = training.handle.digest()
    training.export(work.day.model, None)
    if work.budget.ranks > 1:
        training.check_for_ranks()
        yield f"ranks: its modules can be divided over {work.budget.ranks}"
    yield from _check_end(work, digest)
    if (data_check := load(DataCheck, work.day.data_check)).quarantine:
        raise MosaicError(f"this data would be quarantined: {data_check.reason}")


def _check_data(work: Work) -> Iterator[str]:
    """Begins a day on the new data, or on the last day's, and checks it."""
    folder, recipe = work.folder, work.recipe
    ready = ready_dates(folder, recipe)
    if not ready:
        new = recipe.sources.new
        raise MosaicError(
            f"no data is ready: there is no {new.path.replace('{day}', 'YYYY-MM-DD')}/{new.ready}; put a day's rows "
            "there, and that file last"
        )
    work.day.path.mkdir()
    work.day.set(versions.first_state(folder, recipe, new_dates(folder, recipe) or ready[-1:], "check"))
    freeze(work)
    rows = ", ".join(f"{record.name}: {record.rows} rows" for record in work.sources.sources)
    yield f"data: {rows}; {work.sources.num_steps} steps of {work.sources.batch} samples"
    check_new_data(work)
    yield from (f"data: {finding.sentence}" for finding in load(DataCheck, work.day.data_check).findings)


def _check_end(work: Work, digest: str) -> Iterator[str]:
    """Reads the export back, computes what the frozen rows can tell, and looks for the programs of hooks."""
    exported = Checkpointer(work.program.make_model())
    exported.load_weights(work.day.model)
    if exported.digest() != digest:
        raise MosaicError("the exported weights, read back, are others; look for tensors that are made anew each time")
    yield f"export: {work.day.model.stat().st_size / 2**20:.1f} MiB, read back equal"
    gate, champion = work.recipe.gate, work.day.state.champion
    rows = frozen_rows(work)
    if not rows:
        raise MosaicError(f"there are no frozen rows in {work.recipe.sources.frozen}; put rows there to judge by")
    scores = score_rows(work, model_of(work, champion), champion or "none", "frozen", rows)
    if missing := [name for name in gate.slices if name not in scores.columns]:
        raise MosaicError(f"[gate] slices names {missing[0]!r}, not one of {', '.join(sorted(scores.columns))}")
    finding = margin_finding(scores, gate)
    if not finding.passed:
        raise MosaicError(finding.sentence)
    yield f"gate: {finding.sentence}"
    for command in work.recipe.promote.hooks:
        program = command.split()[0]
        if shutil.which(program) is None and not (work.folder.path / program).exists():
            raise MosaicError(
                f"hook {command!r}: there is no program {program}; give its path from the recipe's folder"
            )
        yield f"hook: {command}"


def _verify(work: Work, copy: DayFolder, group: WorkerGroup, stop: StopRequests, steps: int) -> Iterator[str]:
    """Repeats up to ``steps`` steps of a day from its oldest kept checkpoint, in a copy; yields the result."""
    if steps < 1:
        raise MosaicError(f"--steps {steps} repeats nothing; use 1 or more")
    day, before = work.day, steps_in(work.day.metrics)
    paths = {checkpoint.step: checkpoint.path for checkpoint in checkpoints_in(day.checkpoints)}
    first, last = min(paths, default=0), max(before, default=0)
    if not paths or first >= last:
        raise MosaicError(
            f"{day.path} keeps no checkpoint before its last step ({last}): name a later day, or lower save, or raise "
            "keep in [budget]"
        )
    to = min(first + steps, last)
    to = max((step for step in paths if first < step <= to), default=to)
    budget = replace(work.recipe.budget, save=math.inf)  # saves only at the end
    if group.rank == 0:
        shutil.copytree(paths[first], copy.checkpoints / paths[first].name)
        for path in (day.path / "state.json", day.sources, day.figures, day.environment, day.plan):
            shutil.copyfile(path, copy.path / path.name)
    group.gather(None)  # waits for the copy
    training = Training(replace(work, day=copy, recipe=replace(work.recipe, budget=budget)), group)
    trained = training.train(stop, to=to)
    training.leave()
    if trained.step < to:
        raise _StopError(workers.INTERRUPTED, f"stopped by {trained.ended} at step {trained.step}")
    again = steps_in(copy.metrics)
    for step in range(first + 1, to + 1):
        if group.rank == 0 and step in before and again[step]["loss"] != before[step]["loss"]:
            raise MosaicError(
                f"step {step} of {day.path.name} had the loss {before[step]['loss']} and has "
                f"{again[step]['loss']}: something is not as it was; see environment.json"
            )
    sentence = f"steps {first + 1} to {to} of {day.path.name} have the same losses to the last bit"
    expected = _digest_at(work, to)
    if expected is not None and trained.digest != expected:
        raise MosaicError(f"{sentence}, and the parameters after step {to} differ: {trained.digest} is not {expected}")
    end = f"after step {to}"
    yield f"{sentence}, and the parameters {end} too" if expected else f"{sentence}; no record of the parameters {end}"


def _digest_at(work: Work, step: int) -> str | None:
    """Returns the digest of the parameters after a step, from the day's end or a checkpoint."""
    trained = load_if_intact(Trained, work.day.trained)
    if trained is not None and trained.step == step:
        return trained.digest
    if all(checkpoint.step != step for checkpoint in checkpoints_in(work.day.checkpoints)):
        return None
    keeper = Checkpointer(work.program.make_model())
    keeper.load(work.day.checkpoints, step=step)
    return keeper.digest()


if __name__ == "__main__":
    main()
