"""Two modules in two processes under CUDA's Multi-Process Service, each with a percentage of the threads.

It starts a daemon of its own with pipes in a folder of its own, never touches another daemon, and always ends its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mosaic.child import Child
from mosaic.errors import BackendUnavailableError, MosaicError
from mosaic.microbench.settings import BenchSettings

NEEDS_S = 60.0
"""Seconds to reserve for the start of a daemon and two processes."""

_CONTROL = "nvidia-cuda-mps-control"
_START_IN_NS = 20_000_000


def rounds_under_mps(
    percentages: tuple[int, int], ordinal: int, settings: BenchSettings, *, backward: bool
) -> tuple[float, ...]:
    """Runs the default modules, each in a process of its own; returns milliseconds a step, one mean per round.

    A round begins at one time in both processes and ends with the later one.

    Raises:
        BackendUnavailableError: MPS does not work here, or this user cannot start it.
    """
    with private_daemon() as pipes:
        requests = [
            {"pipes": str(pipes), "percentage": percentage, "which": which, "scale": settings.scale,
             "ordinal": ordinal, "backward": backward}
            for which, percentage in enumerate(percentages)
        ]  # fmt: skip
        try:
            with ExitStack() as stack:
                clients = [
                    stack.enter_context(Child("mosaic.microbench.sharing.mps_client", json.dumps(each)))
                    for each in requests
                ]
                stack.enter_context(_watched(clients))
                return _rounds(clients, settings)
        except MosaicError as error:
            raise BackendUnavailableError(
                "a process under MPS did not answer", found=str(error), needed="a GPU that MPS can serve"
            ) from error


@contextmanager
def private_daemon() -> Iterator[Path]:
    """Starts a daemon whose pipes lie in a temporary folder, yields the folder, and ends the daemon.

    Raises:
        BackendUnavailableError: The program is missing, or does not start.
    """
    program = shutil.which(_CONTROL)
    if program is None:
        raise BackendUnavailableError(
            "MPS cannot be started", found=f"no {_CONTROL} in PATH", needed="an NVIDIA driver"
        )
    with tempfile.TemporaryDirectory(prefix="mosaic-mps-") as folder:
        pipes = Path(folder)
        environment = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
        }
        try:
            started = subprocess.run(
                [program, "-d"], env=environment, capture_output=True, text=True, timeout=30, check=False
            )
            if started.returncode != 0:
                reason = " ".join((started.stderr or started.stdout).split()) or f"exit code {started.returncode}"
                raise BackendUnavailableError(
                    "MPS does not start", found=reason, needed="the right to start its daemon"
                )
            yield pipes
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendUnavailableError("MPS does not start", found=str(error), needed=_CONTROL) from error
        finally:
            _quit(program, environment)


def _quit(program: str, environment: dict[str, str]) -> None:
    try:
        subprocess.run(
            [program], input="quit\n", env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # it never started, or has ended


@contextmanager
def _watched(clients: list[Child]) -> Iterator[None]:
    """Kills hanging processes, which ends the wait for their answer."""

    def end() -> None:
        for client in clients:
            os.kill(client.pid, signal.SIGKILL)

    timer = threading.Timer(4 * NEEDS_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _rounds(clients: list[Child], settings: BenchSettings) -> tuple[float, ...]:
    with ThreadPoolExecutor(len(clients)) as threads:

        def ask(request: dict[str, Any]) -> list[Any]:
            return list(threads.map(lambda client: client.ask(request), clients))

        ask({"steps": 2, "at_ns": 0})
        times = []
        for _ in range(settings.rounds):
            at_ns = time.perf_counter_ns() + _START_IN_NS
            ends = ask({"steps": settings.steps_per_round, "at_ns": at_ns})
            times.append((max(ends) - at_ns) / 1e6 / settings.steps_per_round)
        return tuple(times)
