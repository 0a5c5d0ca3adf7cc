"""``mosaic retrain run`` as forks of one process that has imported everything: a start takes a tenth of a second.

All but the start itself is as it is: a launcher, the worker that it starts, the loader workers of that.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

import mosaic.retrain.day as launcher
from mosaic.retrain import workers
from mosaic.retrain.folder import Folder
from mosaic.retrain.worker import main as worker
from mosaic.retrain.workers import STOPPING

LOADED_LATE = (
    "torch._dynamo",
    "pydantic.dataclasses",
    "pydantic.json_schema",
    "pydantic.plugin",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "zoneinfo",
)
"""Loaded when first needed, for seconds."""
for each in LOADED_LATE:
    importlib.import_module(each)
torch.set_num_threads(1)  # a fork of a process whose threads are gone would wait for them


class Fork:
    """Stands in for ``subprocess.Popen`` in ``Workers``, without starting another program."""

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stdout.flush()
        parent = os.getpid()
        self.returncode: int | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until the fork no longer has its parent's handlers
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            return
        code = 1
        try:
            os.setsid()
            workers.end_with(parent)
            for number in STOPPING:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            code = int(work() or 0)  # type: ignore[call-overload]
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + timeout if timeout is not None else None
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Workers(workers.Workers):
    """Starts workers as forks."""

    def _start(self, command: list[str], more: Mapping[str, str]) -> Any:
        def work() -> None:
            os.environ.update(more)
            sys.argv = command[3:]
            worker.main()

        return Fork(work)


def start(folder: Folder) -> Fork:
    """Starts ``mosaic retrain run`` without its command line."""
    return Fork(lambda: launcher.run(folder.path, print))


launcher.Workers = _Workers  # type: ignore[misc]
