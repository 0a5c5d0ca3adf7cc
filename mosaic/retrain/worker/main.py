"""The worker process, which needs torch: checks a day's data, trains, and scores versions for the gate.

Run by the launcher as ``python -m mosaic.retrain.worker.main FOLDER DAY data train score``. Each part ends with
atomically written files, and is skipped if they exist.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from mosaic.artifact import load, save
from mosaic.errors import MosaicError
from mosaic.retrain import workers
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.folder import Folder, named_remedy
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import WINDOW_OVER
from mosaic.retrain.worker.check import check, verify
from mosaic.retrain.worker.data import check_new_data, freeze
from mosaic.retrain.worker.group import WorkerGroup
from mosaic.retrain.worker.loader import LoaderDiedError
from mosaic.retrain.worker.score import score_versions
from mosaic.retrain.worker.train import Training
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import StopRequests

_LOG = logging.getLogger(__name__)


class _StopError(Exception):
    """The worker ends with a code and a sentence."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


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
    work = Work(folder, folder.day(arguments.day), read_recipe(folder.recipe))
    code, reason = workers.DONE, ""
    try:
        with named_remedy():
            _run(work, arguments)
    except _StopError as stop:
        code, reason = stop.code, str(stop)
    except (torch.OutOfMemoryError, MemoryError) as error:
        code, reason = workers.OUT_OF_MEMORY, str(error)
    except LoaderDiedError as error:
        code, reason = workers.LOADER_DIED, str(error)
    except MosaicError as error:
        code, reason = workers.FAILED, str(error)
    except SystemExit as ended:  # so does this
        code, reason = workers.FAILED, f"the program ended itself: sys.exit({ended.code!r})"
    except Exception as error:  # of any kind, from the user's functions: the report shows it
        _LOG.exception("the worker failed")
        code, reason = workers.FAILED, f"{type(error).__name__}: {error}"
    if code != workers.DONE and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # a full disk; the code says enough
            arguments.error_file.write_text(reason, encoding="utf-8")
    sys.stdout.flush()
    sys.exit(code)


def _run(work: Work, arguments: argparse.Namespace) -> None:
    stop = StopRequests()
    _use_repeatable_kernels(work.device)
    group = WorkerGroup(work.device, pipeline=work.recipe.budget.pipeline)
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
        lines = check(work, group) if parts[0] == "check" else verify(work, group, stop, arguments.steps)
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
    if "train" in parts and not day.trained.is_file():
        model = _train(work, group, stop, arguments.train_until)
    if "score" in parts and not day.scores.is_file():
        score_versions(work, model, check_time)


def _train(work: Work, group: WorkerGroup, stop: StopRequests, until: float | None) -> nn.Module | None:
    training = Training(work, group, until)
    trained = training.train(stop)
    if trained.ended not in ("done", WINDOW_OVER):
        raise _StopError(workers.INTERRUPTED, f"stopped by {trained.ended} at step {trained.step}")
    if trained.step == 0:
        raise _StopError(workers.INTERRUPTED, "the window ended before the first step; the next run begins again")
    model = training.export(work.day.model, work.recipe.export)
    if group.rank == 0:
        save(trained, work.day.trained)
    return model


if __name__ == "__main__":
    main()
