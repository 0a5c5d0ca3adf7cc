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
from mosaic.retrain.data_check import DataCheck
from mosaic.retrain.folder import Folder, named_remedy
from mosaic.retrain.recipe import read_recipe
from mosaic.retrain.worker.check import check
from mosaic.retrain.worker.data import check_new_data, freeze
from mosaic.retrain.worker.score import score_versions
from mosaic.retrain.worker.verify import verify
from mosaic.retrain.worker.work import Work
from mosaic.retrain.workers import PARTS, WorkerError
from mosaic.train import exits
from mosaic.train.data.loader import LoaderDiedError
from mosaic.train.day import Day, end_ranks
from mosaic.train.environment import use_repeatable_kernels
from mosaic.train.records import WINDOW_OVER
from mosaic.train.signals import StopRequests
from mosaic.train.worker_group import WorkerGroup

_LOG = logging.getLogger(__name__)


class _StopError(Exception):
    """The worker ends with a code and a sentence."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def main() -> None:
    """Runs the parts on the command line, and exits with a code of ``mosaic.train.exits``."""
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
    group = work.group()
    use_repeatable_kernels(group.device)
    stopped = None
    try:
        _do_parts(work, group, stop, arguments)
    except _StopError as error:
        stopped = error
    group.leave()
    end_ranks()
    if stopped is not None:
        raise stopped


def _do_parts(work: Work, group: WorkerGroup, stop: StopRequests, arguments: argparse.Namespace) -> None:
    def check_time() -> None:
        over = arguments.total_until is not None and time.monotonic() >= arguments.total_until
        stopped, over = group.any_of(bool(stop.received), over)
        if stopped:
            raise _StopError(exits.INTERRUPTED, f"stopped by {stop.received or 'another rank'}")
        if over:
            raise _StopError(exits.INTERRUPTED, "the window ended before the day was judged; the next run goes on")

    def is_there(path: Path) -> bool:
        return group.broadcast(path.is_file())  # equal on all ranks, even if a file appears meanwhile

    if "check" in arguments.parts:
        for line in check(work, group):
            if group.rank == 0:
                print(line, flush=True)
    if "verify" in arguments.parts:
        result = verify(work, group, stop, arguments.steps)
        print(result if group.rank == 0 else "", end="\n" if group.rank == 0 else "")
    if "data" in arguments.parts:
        check_time()
        if not is_there(work.day.sources):
            group.first_does(lambda: freeze(work))
        if not is_there(work.day.data_check):
            check_new_data(work, group)
        data_check = load(DataCheck, work.day.data_check)
        if data_check.quarantine:
            raise _StopError(exits.QUARANTINED, data_check.reason)
    model = None
    if "train" in arguments.parts and not is_there(work.day.trained):
        model = _train(work, group, stop, arguments.train_until)
    if "score" in arguments.parts and not is_there(work.day.scores):
        score_versions(work, group, model, check_time)


def _train(work: Work, group: WorkerGroup, stop: StopRequests, until: float | None) -> nn.Module | None:
    day = Day(work.program, work.samples(), work.settings(group, until), group)
    trained = day.train(stop)
    if trained.ended not in ("done", WINDOW_OVER):
        raise _StopError(exits.INTERRUPTED, f"stopped by {trained.ended} at step {trained.step}")
    if trained.step == 0:
        raise _StopError(exits.INTERRUPTED, "the window ended before the first step; the next run begins again")
    model = day.export(work.day.model, work.recipe.export)
    if group.rank == 0:
        save(trained, work.day.trained)
    return model


if __name__ == "__main__":
    main()
