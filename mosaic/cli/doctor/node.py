"""Facts of a node for unattended runs, read from files without tools, rights or changes."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import shutil
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mosaic.cli.doctor.gpu_health import GpuHealth, ask_gpus

_TIME_ERROR = 5
"""Result of adjtimex(2) for an unsynchronized clock."""
_KERNEL_LINES = re.compile(r"(?:NVRM: Xid|Out of memory: Killed process|I/O error, dev) .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts of a node; None for unreadable values."""

    folder: str
    """The recipe's folder."""
    file_system: str | None
    """Type of its file system, such as ``ext4`` or ``nfs4``."""
    free_bytes: int
    """Free space for this user."""
    checkpoint_bytes: int | None
    """Size of the largest checkpoint so far; None before the first."""
    kept: int
    """Checkpoints that the recipe keeps."""
    workers: int
    """Loader workers of the recipe, over all ranks."""
    shm_bytes: int | None
    """Size of ``/dev/shm``."""
    clock_kept: bool | None
    """True if the kernel reports a synchronized clock."""
    time_zone: str
    """Name of the machine's time zone."""
    systemd: bool
    """True if systemd runs this machine."""
    user: str
    """The current user."""
    lingers: bool
    """True if this user's units run after logout; true for root."""
    panic_seconds: int | None
    """Seconds from a kernel panic to a reboot; 0 for never."""
    reboots_itself: str | None
    """Setting by which updates reboot this machine."""
    reboot_pending: bool
    """True if updates wait for a reboot."""
    battery: bool
    """True if this machine has a battery, so it may sleep."""
    memory_bytes: int | None
    """Memory of the machine."""
    memory_limit_bytes: int | None
    """Least limit of this process's control groups; None for no limit."""
    swap_used_bytes: int | None
    """Swap in use."""
    cublas_workspace: str | None
    """``CUBLAS_WORKSPACE_CONFIG``, if set."""
    gpus: tuple[GpuHealth, ...]
    """Health of each GPU."""
    kernel_lines: tuple[str, ...]
    """Last kernel log lines on GPUs, killed processes and disks."""


def look_at_node(folder: Path, *, root: Path = Path("/"), environ: dict[str, str] | None = None) -> NodeFacts:
    """Examines this machine for runs of a recipe.

    Args:
        folder: The recipe's folder; ``mosaic retrain check`` reports a missing or invalid recipe.
        root: Root of the machine's files.
        environ: The environment; None for this process's.
    """
    folder = folder.resolve()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    kept, workers = _budget(folder / "retrain.toml")
    shm, user = root / "dev/shm", getpass.getuser()
    return NodeFacts(
        folder=str(folder),
        file_system=_file_system(there, _text(root / "proc/self/mountinfo")),
        free_bytes=shutil.disk_usage(there).free,
        checkpoint_bytes=max(map(_size, folder.glob("days/*/checkpoints/*")), default=None),
        kept=kept,
        workers=workers,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        clock_kept=_clock_kept(),
        time_zone=time.tzname[0] if not time.daylight else "/".join(time.tzname),
        systemd=(root / "run/systemd/system").is_dir(),
        user=user,
        lingers=user == "root" or (root / "var/lib/systemd/linger" / user).exists(),
        panic_seconds=_number(_text(root / "proc/sys/kernel/panic")),
        reboots_itself=_reboots_itself(root / "etc/apt/apt.conf.d"),
        reboot_pending=(root / "run/reboot-required").exists(),
        battery=any(_text(kind).strip() == "Battery" for kind in (root / "sys/class/power_supply").glob("*/type")),
        memory_bytes=_kilobytes(root / "proc/meminfo", "MemTotal"),
        memory_limit_bytes=min(_memory_limits(root), default=None),
        swap_used_bytes=_swap_used(root / "proc/meminfo"),
        cublas_workspace=(os.environ if environ is None else environ).get("CUBLAS_WORKSPACE_CONFIG"),
        gpus=ask_gpus(),
        kernel_lines=_kernel_lines(root / "dev/kmsg"),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().lstrip("-").isdecimal() else None


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(OSError):  # a run may drop it meanwhile
        for path in folder.rglob("*"):
            size += path.stat().st_size
    return size


def _budget(recipe: Path) -> tuple[int, int]:
    """Returns the checkpoints that a recipe keeps and its loader workers, by default 2 and 2."""
    try:
        budget = tomllib.loads(_text(recipe)).get("budget", {})
        return int(budget.get("keep", 2)), int(budget.get("workers", 2)) * int(budget.get("ranks", 1))
    except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):
        return 2, 2


def _file_system(path: Path, mounts: str) -> str | None:
    """Returns the type of the innermost mount above ``path``; later lines cover earlier ones."""
    innermost: tuple[int, str | None] = (-1, None)
    for line in mounts.splitlines():
        before, dash, after = line.partition(" - ")
        if not dash:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= innermost[0]:
            innermost = (len(point.parts), after.split()[0])
    return innermost[1]


def _clock_kept() -> bool | None:
    try:
        answer = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))  # modes 0: it only reads
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def _reboots_itself(folder: Path) -> str | None:
    pattern = re.compile(r'^\s*Unattended-Upgrade::Automatic-Reboot\s+"(true|1|yes)"', re.MULTILINE | re.IGNORECASE)
    return next((str(path) for path in sorted(folder.glob("*")) if pattern.search(_text(path))), None)


def _kilobytes(path: Path, name: str) -> int | None:
    match = re.search(rf"^{name}:\s*(\d+) kB", _text(path), re.MULTILINE)
    return None if match is None else 1024 * int(match[1])


def _swap_used(meminfo: Path) -> int | None:
    total, free = _kilobytes(meminfo, "SwapTotal"), _kilobytes(meminfo, "SwapFree")
    return None if total is None or free is None else total - free


def _memory_limits(root: Path) -> Iterator[int]:
    """Yields the limits of this process's control groups: version 2's, or version 1's, and of all above them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = top / group.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(top):
                break
            limit = _number(_text(folder / name))
            if limit is not None and limit < 1 << 60:  # version 1 says "none" by a number near 2^63
                yield limit


def _kernel_lines(log: Path) -> tuple[str, ...]:
    """Returns kernel log lines; empty if the log is not readable."""
    lines: list[str] = []
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ()
    with contextlib.suppress(OSError), os.fdopen(handle, "rb", buffering=0) as file:
        while record := file.read(8192):  # one record a read; None when all were read
            lines += _KERNEL_LINES.findall(record.decode(errors="replace"))
    return tuple(lines[-3:])
