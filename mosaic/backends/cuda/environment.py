"""Findings in a process's surroundings that defeat partitions of SMs, though every call succeeds."""

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
"""Hardware queues of a process without ``CUDA_DEVICE_MAX_CONNECTIONS``, and the most that it takes."""


class EnvironmentFinding(NamedTuple):
    """One thing that defeats partitions, or may."""

    name: str
    """Its subject, such as a variable's name."""
    description: str
    rule: str
    """Why it matters."""
    remedy: str

    @property
    def sentence(self) -> str:
        """All of it, for a log."""
        return f"{self.description}: {self.rule}; {self.remedy}"


class NvmlDescription(NamedTuple):
    """The driver's own version, such as ``580.65.06``, and the number of devices."""

    driver_version: str
    num_devices: int


class NvmlAnswers(NamedTuple):
    """The state of one device by NVIDIA's management library."""

    processes: tuple[int, ...] = ()
    """Ids of the processes that compute on it, this one included."""
    mig: bool = False
    """True if it is cut into instances."""
    problem: str = ""
    """The reason why NVML did not answer; empty if it did."""


def find_here(uuid: str, *, num_streams: int) -> tuple[EnvironmentFinding, ...]:
    """Looks at this process, which has a context on the device ``uuid`` (as ``nvidia-smi`` prints it) and streams."""
    return (*find_in_process(os.environ, num_streams=num_streams), *find_on_device(ask_nvml(uuid), own=os.getpid()))


def find_in_process(environ: Mapping[str, str], *, num_streams: int | None = None) -> tuple[EnvironmentFinding, ...]:
    """Returns what in a process's environment defeats partitions; ``num_streams`` is None if it is unknown."""
    return (*_mps(environ), *_connections(environ, num_streams))


def mps_control(environ: Mapping[str, str]) -> str:
    """Returns the path of the pipe to an MPS daemon, or an empty text where there is none."""
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    pipe = Path(folder) / "control"
    try:
        return str(pipe) if stat.S_ISFIFO(pipe.stat().st_mode) else ""
    except OSError:
        return ""


@contextmanager
def _open_nvml() -> Iterator[Any]:
    """Opens NVIDIA's management library, which comes with the driver; raises BackendUnavailableError without it."""
    try:
        import pynvml
    except ImportError as error:
        raise BackendUnavailableError(
            "NVML cannot be asked", found=str(error), needed="the package nvidia-ml-py"
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise BackendUnavailableError(
            "NVML does not answer", found=str(error), needed="libnvidia-ml.so.1, which an NVIDIA driver brings"
        ) from error


def describe_nvml() -> NvmlDescription:
    """Returns the versions and devices of NVIDIA's management library; raises BackendUnavailableError without it."""
    with _open_nvml() as library:
        return NvmlDescription(
            driver_version=str(library.nvmlSystemGetDriverVersion()), num_devices=int(library.nvmlDeviceGetCount())
        )


def ask_nvml(uuid: str) -> NvmlAnswers:
    """Queries NVML about one device; the result has the reason if that is not possible."""
    try:
        with _open_nvml() as library:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            pids = [int(process.pid) for process in library.nvmlDeviceGetComputeRunningProcesses(handle)]
            try:
                is_mig = bool(library.nvmlDeviceGetMigMode(handle)[0])
            except library.NVMLError:  # devices without MIG do not know the question
                is_mig = False
            return NvmlAnswers(processes=tuple(sorted(pids)), mig=is_mig)
    except BackendUnavailableError as error:
        return NvmlAnswers(problem=error.found)


def _mps(environ: Mapping[str, str]) -> Iterator[EnvironmentFinding]:
    name = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
    percentage = environ.get(name)
    if percentage is not None and not re.fullmatch(r"100(\.0*)?", percentage.strip()):
        rule = "under MPS this overrides partitions, and work may use more SMs than its quota"
        yield EnvironmentFinding(name, f"{name}={percentage}", rule, "unset it, or set it to 100")
    if pipe := mps_control(environ):
        yield EnvironmentFinding(
            "MPS",
            f"an MPS daemon listens at {pipe}",
            "under MPS other processes run on the SMs of the partitions at the same time",
            "end it with `echo quit | nvidia-cuda-mps-control`, unless that is meant",
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
        "streams that share a hardware queue wait for each other, whatever their SMs",
        advice if text is None else f"unset it (the default is {DEFAULT_CONNECTIONS}) or {advice}",
    )


def find_on_device(nvml: NvmlAnswers, *, own: int | None = None) -> Iterator[EnvironmentFinding]:
    """Yields what on a device defeats partitions; ``own`` is this process's id if it has a context there."""
    if nvml.problem:
        yield EnvironmentFinding(
            "NVML",
            f"NVML does not answer ({nvml.problem})",
            "whether other processes use this GPU, whose work takes turns with all partitions, is unknown",
            "bring nvidia-ml-py and the driver's libnvidia-ml.so.1, or look at `nvidia-smi`",
        )
    # In a container ids are those outside of it, so one unknown id is taken for this process.
    others = tuple(process for process in nvml.processes if process != own)
    if own is not None and own not in nvml.processes and len(nvml.processes) == 1:
        others = ()
    if others:
        yield EnvironmentFinding(
            "other processes",
            f"other processes use this GPU (ids {', '.join(map(str, others))})",
            "without MPS the GPU gives each process all SMs in turn, whatever the partitions",
            "end them, or take another GPU",
        )
    if nvml.mig:
        yield EnvironmentFinding(
            "MIG",
            "this GPU is in MIG mode",
            "slots are those of the instance, and bandwidth is the instance's share",
            "nothing, if that is meant; else `nvidia-smi -mig 0`",
        )
