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
from mosaic.retrain import exits
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.exits import StopRequests
from mosaic.retrain.folder import Folder, named_remedy
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.records import WINDOW_OVER
from mosaic.retrain.worker.check import check, verify
from mosaic.retrain.worker.data import check_new_data, freeze
from mosaic.retrain.worker.environment import use_repeatable_kernels
from mosaic.retrain.worker.group import WorkerGroup
from mosaic.retrain.worker.loader import LoaderDiedError
from mosaic.retrain.worker.score import score_versions
from mosaic.retrain.worker.train import Training
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import PARTS, WorkerError

_LOG = logging.getLogger(__name__)


class _StopError(Exception):
    """The worker ends with a code and a sentence."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def main() -> None:
    """Runs the parts on the command line, and exits with a code of ``mosaic.retrain.exits``."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("day")
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "check", "verify"))
    parser.add_argument("--error-file", type=Path, required=True)
    parser.add_argument("--train-until", type=float)  # of time.monotonic()
    parser.add_argument("--total-until", type=float)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    folder = Folder(arguments.folder)
    work = Work(folder, folder.day(arguments.day), read_recipe(folder.recipe))
    code, reason = exits.DONE, ""
    try:
        with named_remedy():
            _run(work, arguments)
    except _StopError as stop:
        code, reason = stop.code, str(stop)
    except (torch.OutOfMemoryError, MemoryError) as error:
        code, reason = exits.OUT_OF_MEMORY, str(error)
    except LoaderDiedError as error:
        code, reason = exits.LOADER_DIED, str(error)
    except MosaicError as error:
        code, reason = exits.FAILED, str(error)
    except SystemExit as ended:  # so does this
        code, reason = exits.FAILED, f"the program ended itself: sys.exit({ended.code!r})"
    except Exception as error:  # of any kind, from the user's functions: the report shows it
        _LOG.exception("the worker failed")
        code, reason = exits.FAILED, f"{type(error).__name__}: {error}"
    if code != exits.DONE and os.environ.get("RANK", "0") == "0":
        with suppress(MosaicError):  # a full disk; the code says enough
            save(WorkerError(reason=reason), arguments.error_file)
    sys.stdout.flush()
    sys.exit(code)


def _run(work: Work, arguments: argparse.Namespace) -> None:
    stop = StopRequests()
    use_repeatable_kernels(work.device)
    group = work.group()
    stopped = None
    try:
        _do_parts(work, group, stop, arguments)
    except _StopError as error:
        stopped = error
    group.leave()
    if stopped is not None:
        raise stopped


def _do_parts(work: Work, group: WorkerGroup, stop: StopRequests, arguments: argparse.Namespace) -> None:
    """Does the parts of a task; several ranks only train, check and verify."""

    def check_time() -> None:
        if stop.received:
            raise _StopError(exits.INTERRUPTED, f"stopped by {stop.received}")
        if arguments.total_until is not None and time.monotonic() >= arguments.total_until:
            raise _StopError(exits.INTERRUPTED, "the window ended before the day was judged; the next run goes on")

    parts, day = arguments.parts, work.day
    lines = check(work, group) if "check" in parts else verify(work, group, stop, arguments.steps)
    if "check" in parts or "verify" in parts:
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
            raise _StopError(exits.QUARANTINED, data_check.reason)
    model = None
    if "train" in parts and not day.trained.is_file():
        model = _train(work, group, stop, arguments.train_until)
    if "score" in parts and not day.scores.is_file():
        score_versions(work, model, check_time)


def _train(work: Work, group: WorkerGroup, stop: StopRequests, until: float | None) -> nn.Module | None:
    training = Training(work, group, until)
    trained = training.train(stop)
    if trained.ended not in ("done", WINDOW_OVER):
        raise _StopError(exits.INTERRUPTED, f"stopped by {trained.ended} at step {trained.step}")
    if trained.step == 0:
        raise _StopError(exits.INTERRUPTED, "the window ended before the first step; the next run begins again")
    model = training.export(work.day.model, work.recipe.export)
    if group.rank == 0:
        save(trained, work.day.trained)
    return model


if __name__ == "__main__":
    main()
