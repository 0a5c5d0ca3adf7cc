"""Finds settings and processes that silently defeat partitions of SMs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mosaic.errors import BackendUnavailableError

DEFAULT_CONNECTIONS, MAX_CONNECTIONS = 8, 32
"""Hardware queues of a process by default, and the maximum of ``CUDA_DEVICE_MAX_CONNECTIONS``."""


class EnvironmentFinding(NamedTuple):
    """A condition that defeats partitions, or may."""

    name: str
    """Its subject, such as a variable's name."""
    description: str
    rule: str
    """Its effect."""
    remedy: str

    @property
    def sentence(self) -> str:
        """All fields, for a log."""
        return f"{self.description}: {self.rule}; {self.remedy}"


class NvmlDescription(NamedTuple):
    """The driver's version, such as ``580.65.06``, and the number of devices."""

    driver_version: str
    num_devices: int


class NvmlAnswers(NamedTuple):
    """The state of one device, by NVML."""

    processes: tuple[int, ...] = ()
    """Ids of the processes that compute on it, including this one."""
    mig: bool = False
    """True if it is in MIG mode."""
    problem: str = ""
    """The reason why NVML failed; empty if it did not."""


def find_here(uuid: str, *, num_streams: int) -> tuple[EnvironmentFinding, ...]:
    """Examines this process, which has streams and a context on the device ``uuid`` (as printed by ``nvidia-smi``)."""
    return (*find_in_process(os.environ, num_streams=num_streams), *find_on_device(ask_nvml(uuid), own=os.getpid()))


def find_in_process(environ: Mapping[str, str], *, num_streams: int | None = None) -> tuple[EnvironmentFinding, ...]:
    """Returns environment settings that defeat partitions; ``num_streams`` is None if unknown."""
    return (*_mps(environ), *_connections(environ, num_streams))


def mps_control(environ: Mapping[str, str]) -> str:
    """Returns the path of the pipe to an MPS daemon, or an empty string."""
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    pipe = Path(folder) / "control"
    try:
        return str(pipe) if stat.S_ISFIFO(pipe.stat().st_mode) else ""
    except OSError:
        return ""


@contextmanager
def _open_nvml() -> Iterator[Any]:
    """Opens NVML, which comes with the driver; raises BackendUnavailableError without it."""
    try:
        import pynvml
    except ImportError as error:
        raise BackendUnavailableError(
            "NVML is unavailable", found=str(error), needed="the package nvidia-ml-py"
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise BackendUnavailableError(
            "NVML does not answer", found=str(error), needed="libnvidia-ml.so.1 of an NVIDIA driver"
        ) from error


def describe_nvml() -> NvmlDescription:
    """Returns NVML's versions and devices; raises BackendUnavailableError without it."""
    with _open_nvml() as library:
        return NvmlDescription(
            driver_version=str(library.nvmlSystemGetDriverVersion()), num_devices=int(library.nvmlDeviceGetCount())
        )


def ask_nvml(uuid: str) -> NvmlAnswers:
    """Queries NVML about one device; the result has the reason of a failure."""
    try:
        with _open_nvml() as library:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            pids = [int(process.pid) for process in library.nvmlDeviceGetComputeRunningProcesses(handle)]
            try:
                is_mig = bool(library.nvmlDeviceGetMigMode(handle)[0])
            except library.NVMLError:  # devices without MIG do not support the query
                is_mig = False
            return NvmlAnswers(processes=tuple(sorted(pids)), mig=is_mig)
    except BackendUnavailableError as error:
        return NvmlAnswers(problem=error.found)


def _mps(environ: Mapping[str, str]) -> Iterator[EnvironmentFinding]:
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    percentage = environ.get(name)
    if percentage is not None and not re.fullmatch(r"100(\.0*)?", percentage.strip()):
        rule = "under MPS this overrides partitions, so work may use more SMs than its quota"
        yield EnvironmentFinding(name, f"{name}={percentage}", rule, "unset it, or set it to 100")
    if pipe := mps_control(environ):
        yield EnvironmentFinding(
            "MPS",
            f"an MPS daemon listens at {pipe}",
            "under MPS other processes use the SMs of the partitions at the same time",
            "end it with `echo quit | nvidia-cuda-mps-control`, unless it is intended",
        )


def _connections(environ: Mapping[str, str], num_streams: int | None) -> Iterator[EnvironmentFinding]:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    text = environ.get(name)
    is_valid = text is None or (text.strip().isdecimal() and 1 <= int(text) <= MAX_CONNECTIONS)
    queues = int(text) if text is not None and is_valid else DEFAULT_CONNECTIONS
    needed = DEFAULT_CONNECTIONS if num_streams is None else min(num_streams + 1, MAX_CONNECTIONS)
    if is_valid and queues >= needed:
        return
    streams = "" if num_streams is None else f" for {num_streams} lanes and the stream of the loop"
    setting = f"={text}" if text is not None else f" is not set, so there are {DEFAULT_CONNECTIONS} queues"
    advice = f"set {MAX_CONNECTIONS} before the process starts"
    yield EnvironmentFinding(
        name,
        f"{name}{setting}{streams}",
        "streams that share a hardware queue wait for each other",
        advice if text is None else f"unset it (the default is {DEFAULT_CONNECTIONS}) or {advice}",
    )


def find_on_device(nvml: NvmlAnswers, *, own: int | None = None) -> Iterator[EnvironmentFinding]:
    """Yields conditions of a device that defeat partitions; ``own`` is this process's id if it has a context."""
    if nvml.problem:
        yield EnvironmentFinding(
            "NVML",
            f"NVML does not answer ({nvml.problem})",
            "other processes may use this GPU and take turns with all partitions",
            "install nvidia-ml-py and the driver's libnvidia-ml.so.1, or check `nvidia-smi`",
        )
    # in a container NVML returns ids of the host, so one unknown id counts as this process
    others = tuple(process for process in nvml.processes if process != own)
    if own is not None and own not in nvml.processes and len(nvml.processes) == 1:
        others = ()
    if others:
        yield EnvironmentFinding(
            "other processes",
            f"other processes use this GPU (ids {', '.join(map(str, others))})",
            "without MPS processes take turns on all SMs, regardless of partitions",
            "end them, or use another GPU",
        )
    if nvml.mig:
        yield EnvironmentFinding(
            "MIG",
            "this GPU is in MIG mode",
            "slots and bandwidth are those of the instance",
            "none if it is intended; otherwise `nvidia-smi -mig 0`",
        )
