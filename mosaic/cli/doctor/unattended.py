"""``mosaic doctor --retrain FOLDER``: problems of a node for unattended runs, and their remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from mosaic.cli.doctor.gpu_health import GpuHealth
from mosaic.cli.doctor.node import NodeFacts, look_at_node
from mosaic.cli.doctor.printing import SEVERITIES, print_findings
from mosaic.cli.doctor.report import Diagnosis, Severity

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "9p", "afs", "glusterfs", "beegfs")
_FLEETING = ("tmpfs", "ramfs", "overlay")
_MIN_SHM_BYTES = 1 << 30
_DETERMINISTIC = (":4096:8", ":16:8")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnattendedReport:
    """Facts of a node, and findings."""

    node: NodeFacts
    """Facts of the node."""
    findings: tuple[Diagnosis, ...]
    """``error``: runs will fail; ``warning``: nights may be lost; ``note``: good to know."""


def examine_node(folder: Path) -> UnattendedReport:
    """Examines this machine for runs of the recipe in ``folder``; changes nothing."""
    node = look_at_node(folder)
    return UnattendedReport(node=node, findings=find_in_node(node))


def find_in_node(node: NodeFacts) -> tuple[Diagnosis, ...]:
    """Returns the findings of a node, the worst first."""
    findings = [finding for rule in RULES for finding in rule(node)]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def render(report: UnattendedReport, console: Console) -> None:
    """Prints the findings."""
    console.print(f"[bold]Runs without anyone watching, in {escape(report.node.folder)}[/bold]")
    print_findings(report.findings, console)


def _say(severity: Severity, what: str, todo: str) -> Diagnosis:
    return Diagnosis(severity=severity, what=what, todo=todo)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"


def _disk(node: NodeFacts) -> Iterator[Diagnosis]:
    free = _size(node.free_bytes)
    if node.checkpoint_bytes is None:
        yield _say(
            "note",
            f"{free} are free; how large a checkpoint is will be known after the first run",
            f"leave room for {node.kept + 2} checkpoints (three times the model, with AdamW) and the export",
        )
        return
    needed = (node.kept + 2) * node.checkpoint_bytes
    if node.free_bytes < needed:
        yield _say(
            "error",
            f"{free} are free, and {node.kept + 2} checkpoints of {_size(node.checkpoint_bytes)} need {_size(needed)}",
            "free some room: old days' checkpoints and old versions first, or lower budget.keep",
        )


def _file_system(node: NodeFacts) -> Iterator[Diagnosis]:
    kind = node.file_system or ""
    if kind in _NETWORK or kind.startswith("fuse."):
        yield _say(
            "warning",
            f"the folder lies on {kind}, whose locks may be lost or not be seen by other machines",
            "start runs from one machine only (the lease names who holds the folder), or move it to a local disk",
        )
    if kind in _FLEETING:
        yield _say(
            "warning",
            f"the folder lies on {kind}, which a restart of the machine or container empties",
            "move it to a disk that stays, such as a mounted volume",
        )


def _memory(node: NodeFacts) -> Iterator[Diagnosis]:
    if node.workers and node.shm_bytes is not None and node.shm_bytes < _MIN_SHM_BYTES:
        yield _say(
            "warning",
            f"/dev/shm has {_size(node.shm_bytes)}, through which {node.workers} loader workers hand their batches on",
            "give the container more (docker: --shm-size=8g; Kubernetes: an emptyDir in memory), or set workers = 0",
        )
    limit, memory = node.memory_limit_bytes, node.memory_bytes
    if limit is not None and memory is not None and limit < memory:
        yield _say(
            "note",
            f"a control group allows {_size(limit)} of {_size(memory)}; what takes more is killed by SIGKILL",
            "nothing, if that is enough; a run that was killed goes on from its last checkpoint, to be killed again",
        )
    if node.swap_used_bytes is not None and node.swap_used_bytes > 1 << 30:
        yield _say(
            "warning",
            f"{_size(node.swap_used_bytes)} of memory lie on the disk: steps wait for them",
            "see who takes the memory (`ps aux --sort -rss`), or add some",
        )


def _clock(node: NodeFacts) -> Iterator[Diagnosis]:
    if node.clock_kept is False:
        yield _say(
            "warning",
            "nothing keeps the clock right: a day may be named wrongly, and the window kept at the wrong time",
            "install and start chrony or systemd-timesyncd",
        )
    if node.time_zone not in ("UTC", "Etc/UTC"):
        yield _say(
            "note",
            f"the machine's time zone is {node.time_zone}; recipes, days and the templates are in UTC",
            "write UTC into what you schedule yourself: local times are skipped or come twice when clocks change",
        )


def _starting(node: NodeFacts) -> Iterator[Diagnosis]:
    if not node.systemd:
        yield _say(
            "note",
            "systemd does not run this machine",
            "start runs by Slurm, Kubernetes or cron; examples/retrain in the repository has a file for each",
        )
    elif not node.lingers:
        yield _say(
            "note",
            f"units of the user {node.user} end when {node.user} logs out",
            f"with user units: loginctl enable-linger {node.user}; units of the system need nothing",
        )


def _restarts(node: NodeFacts) -> Iterator[Diagnosis]:
    if node.panic_seconds == 0:
        yield _say(
            "note",
            "after a kernel panic this machine stands still until a person comes (kernel.panic = 0)",
            "sysctl kernel.panic=30, and the same in /etc/sysctl.d",
        )
    if node.reboots_itself:
        yield _say(
            "note",
            f"updates restart this machine by themselves ({node.reboots_itself})",
            "set Unattended-Upgrade::Automatic-Reboot-Time outside of the window; a run goes on after the boot anyway",
        )
    if node.reboot_pending:
        yield _say("note", "updates wait for a restart", "restart between two runs: a new driver may change their bits")
    if node.battery:
        yield _say(
            "warning",
            "this machine has a battery: it may sleep at night",
            "systemctl mask sleep.target suspend.target, and leave it plugged in",
        )


def _bits(node: NodeFacts) -> Iterator[Diagnosis]:
    if node.cublas_workspace is not None and node.cublas_workspace not in _DETERMINISTIC:
        yield _say(
            "warning",
            f"CUBLAS_WORKSPACE_CONFIG={node.cublas_workspace}: cuBLAS may give other bits each time",
            f"unset it; runs set {_DETERMINISTIC[0]} themselves",
        )


def _gpus(node: NodeFacts) -> Iterator[Diagnosis]:
    for gpu in node.gpus:
        yield from _gpu(gpu)
    if node.kernel_lines:
        yield _say(
            "warning",
            f"the kernel's log has: {'; '.join(node.kernel_lines)}",
            "look it up (NVIDIA lists its Xid errors); several of a kind mean hardware, or memory that is too small",
        )


def _gpu(gpu: GpuHealth) -> Iterator[Diagnosis]:
    which = f"GPU {gpu.index} ({gpu.name})"
    if gpu.persistent is False:
        yield _say(
            "note",
            f"{which}: persistence mode is off, so its driver is loaded anew for each run",
            "enable nvidia-persistenced, or `nvidia-smi -pm 1` at each boot",
        )
    if gpu.ecc is False:
        yield _say(
            "note",
            f"{which}: error correction of its memory is off; a flipped bit goes unseen into the weights",
            "`nvidia-smi -e 1` and a restart, if it was not turned off on purpose",
        )
    if gpu.needs_reset:
        yield _say(
            "error",
            f"{which}: rows of its memory failed and wait to be replaced",
            "`nvidia-smi -r` when nobody uses it, or restart; have it exchanged if that does not help",
        )
    elif gpu.uncorrected:
        yield _say(
            "warning",
            f"{which}: its memory had {gpu.uncorrected} errors that could not be corrected",
            "see `nvidia-smi -q -d ECC,ROW_REMAPPER`; have it exchanged if they grow",
        )


RULES: tuple[Callable[[NodeFacts], Iterator[Diagnosis]], ...] = (
    _disk,
    _file_system,
    _memory,
    _clock,
    _starting,
    _restarts,
    _bits,
    _gpus,
)
