"""``mosaic doctor``: diagnoses this machine, a model, the ranks of a run, or a node for unattended retraining."""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import arg

import mosaic
from mosaic.cache_folder import default_cache_folder, folder_use
from mosaic.cli.options import Json, OptionalModel, console_beside, takes_stdout, write_json
from mosaic.errors import BackendUnavailableError, CudaError, UnsupportedModelError

Severity = Literal["error", "warning", "note"]
_PACKAGES: Mapping[str, str | None] = {
    **dict.fromkeys(("torch", "numpy", "scipy", "ortools", "cuda-python", "nvidia-ml-py", "pydantic", "tyro", "rich")),
    **{"safetensors": None, "matplotlib": "plot", "scikit-learn": "demo"},
}
"""Distributions, each with the extra that installs it; None if Mosaic always needs it."""
_REMEDY_BY_STATUS = {
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver was updated under a running kernel module: reboot",
    "CUDA_ERROR_NOT_INITIALIZED": "run outside a process forked after CUDA was used",
}
_LOST = {"base": "devices cannot be described", "slots": "SMs cannot be split into slots",
         "streams": "slots cannot have streams"}  # fmt: skip
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "9p", "afs", "glusterfs", "beegfs")
_EPHEMERAL = ("tmpfs", "ramfs", "overlay")
_MIN_SHM_BYTES = 1 << 30
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact that matters, with its remedy."""

    severity: Severity
    """``error``: it cannot run; ``warning``: partitions, a module or a night may suffer; ``note``: good to know."""
    description: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of one examination."""

    facts: Mapping[str, Any]
    """Plain data for ``--json``."""
    findings: tuple[Finding, ...]
    """The worst first."""
    blocks: tuple[Any, ...] = ()
    """Text and tables for the terminal, above the findings."""

    def write(self, target: Path | None) -> None:
        """Prints the diagnosis and writes it to the target of ``--json``."""
        facts = {**self.facts, "findings": [asdict(finding) for finding in self.findings]}
        write_json(json.dumps(facts, indent=2) + "\n", target)
        if not takes_stdout(target):
            console = console_beside(target)
            console.soft_wrap = True  # the terminal wraps sentences
            self.print(console)

    def print(self, console: Console) -> None:
        """Prints the blocks, then findings with their remedies."""
        for block in self.blocks:
            console.print(block)
        console.print("\n[bold]Findings and remedies[/bold]" if self.findings else "\nNothing to do.")
        for finding in self.findings:
            style = _STYLES[finding.severity]
            console.print(f"  [{style}]{finding.severity}[/{style}]: {escape(finding.description)}")
            console.print(f"    -> {escape(finding.remedy)}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report this machine's devices, what works on it, what is missing, and the remedies.

    Exits 0 even without a GPU. --model diagnoses a model instead: modules that can be placed, and those that cannot
    with their line of code and a remedy; exits 1 if the model cannot be colocated. --trace compares the ranks of a run
    and names the slow ones. --retrain checks this machine for unattended runs of a recipe: disk space, file system,
    shared memory, logout, and the memory of its GPUs.
    """

    model: OptionalModel = None
    trace: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """Traces of a run's ranks, from handle.write_trace(folder): the files, or the folder."""
    retrain: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """The folder of a recipe for mosaic retrain."""
    json: Json = None

    def execute(self) -> None:
        if self.model is not None:
            diagnosis = examine_model(self.model)
        elif self.trace:
            from mosaic.report.slow_ranks import examine_traces

            comparison = examine_traces(self.trace)
            write_json(json.dumps(comparison.facts(), indent=2) + "\n", self.json)
            if not takes_stdout(self.json):
                comparison.print(console_beside(self.json))
            return
        else:
            diagnosis = examine_node(self.retrain) if self.retrain is not None else examine_machine()
        diagnosis.write(self.json)
        if self.model is not None and any(finding.severity == "error" for finding in diagnosis.findings):
            raise UnsupportedModelError(f"{self.model} cannot be colocated; the findings give reasons and remedies")


def examine_model(where: str) -> Diagnosis:
    """Constructs a model and names the modules that can be placed, and what prevents the others.

    Args:
        where: ``FILE:FACTORY`` or a model of the zoo.
    """
    from mosaic.cli.workload import load_workload
    from mosaic.engine.examine import examine

    workload = load_workload(where)
    examination = examine(workload.model, workload.sample, origin=where)
    findings = [Finding("error", remark.seen, remark.todo) for remark in examination.refused]
    findings += [Finding("warning", remark.seen, remark.todo) for remark in examination.in_place]
    findings += [Finding("note", remark.seen, remark.todo) for remark in examination.to_know]
    title = "Modules that can be placed" if examination.modules else "No module can be placed."
    lines = [f"[bold]{escape(where)}[/bold]\n", f"[bold]{title}[/bold]"]
    for name, sources in examination.modules.items():
        after = f", after {', '.join(sources)}" if sources else ""
        lines.append(f"  - {escape(name + after)}")
    return Diagnosis({"model": where, "modules": examination.modules}, tuple(findings), ("\n".join(lines),))


def examine_machine(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Examines devices, driver and packages; a broken driver raises no error. Does not import torch."""
    machine = _Machine()
    facts: dict[str, Any] = {"mosaic": mosaic.__version__, "host": machine.host(environ)}
    facts["torch"], facts["packages"] = _torch(), machine.packages()
    facts |= machine.driver()
    facts["nvml"], facts["probe"] = machine.nvml(facts), machine.probe(facts)
    machine.settings(environ, facts)
    if facts["torch"] and not facts["torch"]["cuda"] and facts["devices"]:
        text = f"torch {facts['torch']['version']} is built without CUDA, but this machine has a GPU"
        machine.find("warning", text, "install a CUDA build: https://pytorch.org/get-started/locally/")
    facts["cache"] = machine.cache(environ)
    facts["works"] = _works(facts)
    works = "\n[bold]What works on this machine[/bold]\n" + "\n".join(f"  - {escape(line)}" for line in facts["works"])
    devices = _device_table(facts["devices"]) if facts["devices"] else "[bold]No NVIDIA GPU can be used here.[/bold]"
    return Diagnosis(facts, _sorted(machine.findings), (_overview(facts), devices, works))


class _Machine:
    """Examinations of one machine; each returns facts, and adds to the findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def find(self, severity: Severity, description: str, remedy: str) -> None:
        self.findings.append(Finding(severity, description, remedy))

    def host(self, environ: Mapping[str, str]) -> dict[str, Any]:
        installed = os.cpu_count() or 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
        policy = environ.get("OMP_WAIT_POLICY")
        if cores == 1:
            text = "one CPU core: on the host backend modules take turns, and colocation gains nothing"
            self.find("note", text, "give the process more cores (taskset, the container's cpuset)")
        if (policy or "").upper() != "PASSIVE":
            text = f"OMP_WAIT_POLICY is {policy or 'not set'}: idle threads of one lane spin on the cores of another"
            self.find("note", text, "in your own scripts `export OMP_WAIT_POLICY=PASSIVE` before Python starts")
        return {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "num_cores": cores,
            "num_cores_installed": installed,
            "omp_wait_policy": policy,
        }

    def packages(self) -> dict[str, str | None]:
        versions = {name: _version(name) for name in _PACKAGES}
        for name in (name for name, version in versions.items() if version is None):
            if extra := _PACKAGES[name]:
                remedy = f"pip install 'mosaic-colocate[{extra}]', if you want it"
                self.find("note", f"the package {name} is not installed (extra `{extra}`)", remedy)
            else:
                self.find("error", f"the package {name} is missing, and Mosaic needs it", f"pip install {name}")
        return versions

    def driver(self) -> dict[str, Any]:
        """Returns the facts ``extension_loads``, ``driver`` and ``devices``."""
        from mosaic.backends.cuda import driver as cuda

        facts: dict[str, Any] = {"extension_loads": False, "driver": None, "devices": []}
        try:
            cuda.require_extension()
        except BackendUnavailableError as error:
            remedy = "run `pip install -e .` (or `pip install .`) in Mosaic's folder; it needs g++ and Python's headers"
            self.find("error", f"the extension mosaic._C does not load: {error.found}", remedy)
            return facts
        facts["extension_loads"] = True
        try:
            driver = cuda.describe_driver()
            facts["driver"] = asdict(driver)
            lost = cuda.lost_uses(driver)
            for use in lost:
                missing = ", ".join(f"{call.name} ({call.since})" for call in driver.missing if call.use == use)
                text = f"the driver (CUDA {driver.version}) lacks {missing}"
                remedy = f"install a driver of CUDA 12.5 or newer: with this one {_LOST[use]}"
                self.find("error", text, remedy)
            if "base" not in lost:
                for device in cuda.describe_devices():
                    facts["devices"].append({**asdict(device), **self._slots(device.ordinal, lost)})
        except BackendUnavailableError as error:
            remedy = "nothing, if this machine has no NVIDIA GPU; else install its driver (CUDA 12.5 or newer), start "
            remedy += "the container with its GPUs, and look at CUDA_VISIBLE_DEVICES"
            self.find("note", str(error), remedy)
        except CudaError as error:
            remedy = _REMEDY_BY_STATUS.get(error.status, "see whether `nvidia-smi` works, then `dmesg`; reboot")
            self.find("error", str(error), remedy)
        return facts

    def _slots(self, ordinal: int, lost: Sequence[str]) -> dict[str, Any]:
        from mosaic.backends.cuda import driver as cuda

        slots: dict[str, Any] = {"slots": None, "fine_slots": None}
        if "slots" not in lost:
            try:
                for name, fine in (("slots", False), ("fine_slots", True)):
                    slots[name] = asdict(cuda.CudaDriver(ordinal).describe_slots(fine=fine))
            except (BackendUnavailableError, CudaError) as error:
                remedy = "update the driver (CUDA 12.5 or newer); green contexts also need a 64-bit Linux"
                self.find("error", f"device {ordinal} cannot be split into slots: {error}", remedy)
        return slots

    def nvml(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        from mosaic.backends.cuda.environment import describe_nvml

        try:
            nvml = describe_nvml()
        except BackendUnavailableError as error:
            text = f"NVML does not respond: {error.found}"
            if facts["driver"] is None:
                self.find("note", text, "nothing, if this machine has no NVIDIA GPU")
            else:
                self.find("warning", text, f"without it utilisation cannot be measured; it needs {error.needed}")
            return None
        if facts["driver"] is not None and nvml.num_devices != len(facts["devices"]):
            text = f"NVML counts {nvml.num_devices} GPUs, the CUDA driver offers {len(facts['devices'])}"
            self.find("note", text, "look at CUDA_VISIBLE_DEVICES and at MIG, if that is not intended")
        return asdict(nvml)

    def probe(self, facts: Mapping[str, Any]) -> str | None:
        """Returns the version of the NVRTC that compiles the SM probe."""
        from mosaic.backends.cuda.probe import nvrtc_version

        try:
            return nvrtc_version()
        except BackendUnavailableError as error:
            if facts["devices"]:
                text = f"partitions cannot be probed, so their SM ids stay unknown: {error.found}"
                self.find("warning", text, f"install {error.needed}")
            return None

    def settings(self, environ: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        """Finds settings and other users that defeat partitions; the number of streams is not known yet."""
        from mosaic.backends.cuda.environment import Surroundings, ask_nvml, find_in, mps_control

        where = {"": Surroundings(environ=environ, num_streams=None, mps_control=mps_control(environ))}
        for device in facts["devices"]:
            nvml = ask_nvml(device["uuid"])
            if not nvml.problem:  # otherwise there is a finding about NVML already
                where[f"device {device['ordinal']}: "] = Surroundings(environ={}, num_streams=None, nvml=nvml)
        for prefix, surroundings in where.items():
            for finding in find_in(surroundings):
                self.find("warning", f"{prefix}{finding.found}: {finding.rule}", finding.way_out)
        order = environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")
        if len(facts["devices"]) > 1 and order != "1":
            self.find(
                "note" if order is None else "warning",
                f"NCCL_LAUNCH_ORDER_IMPLICIT is {order or 'not set'}: several ranks need 1; NCCL reads it once in a "
                "process, at the first collective",
                "`export NCCL_LAUNCH_ORDER_IMPLICIT=1` before the ranks start, if your loop makes the process group",
            )

    def cache(self, environ: Mapping[str, str]) -> dict[str, Any] | None:
        try:
            folder = default_cache_folder(environ)
        except RuntimeError as error:
            remedy = "set HOME or XDG_CACHE_HOME, or give mosaic.colocate a cache folder"
            self.find("note", f"measurements are not kept from run to run: {error}", remedy)
            return None
        num_files, num_bytes = folder_use(folder)
        return {"folder": str(folder), "num_files": num_files, "num_bytes": num_bytes}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, str | None] | None:
    version, spec = _version("torch"), importlib.util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return None
    # torch's CUDA version is in this file; importing torch would take a second.
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return {"version": version, "cuda": cuda[1] if cuda else None}


def _works(facts: Mapping[str, Any]) -> list[str]:
    works = ["planning for any described device (`mosaic plan`); it needs no GPU"]
    cores = facts["host"]["num_cores"]
    if facts["torch"] is not None:
        lanes = f"modules side by side on {cores} core{'s' if cores > 1 else ''}"
        works.append(f"the host backend: {lanes} (`mosaic demo`, `mosaic profile`, `mosaic run`)")
    has_streams = facts["driver"] and all(call["use"] == "placement" for call in facts["driver"]["missing"])
    if any(device["slots"] for device in facts["devices"]):
        if has_streams and facts["torch"] and facts["torch"]["cuda"]:
            works.append("the cuda backend: modules side by side on SM partitions (`mosaic bench` measures the gain)")
        else:
            works.append("splitting the GPU's SMs into slots, to look at them")
    return works


def _overview(facts: Mapping[str, Any]) -> Table:
    host, torch, driver, nvml, cache = (facts[name] for name in ("host", "torch", "driver", "nvml", "cache"))
    cuda = f"with CUDA {torch['cuda']}" if torch and torch["cuda"] else "without CUDA"
    rows = {
        "machine": f"{host['platform']}, Python {host['python']}",
        "CPU cores": f"{host['num_cores']} available of {host['num_cores_installed']}",
        "OMP_WAIT_POLICY": host["omp_wait_policy"] or "not set",
        "torch": f"{torch['version']}, built {cuda}" if torch else "not installed",
        "extension": f"mosaic._C {'loads' if facts['extension_loads'] else 'does not load'}",
        "driver": f"CUDA {driver['version']}" if driver else "none",
        "NVML": f"driver {nvml['driver_version']}, {nvml['num_devices']} GPUs" if nvml else "none",
        "SM probe": f"compiled by NVRTC {facts['probe']}" if facts["probe"] else "cannot be compiled",
        "profile cache": escape(f"{cache['folder']} ({cache['num_files']} files, {cache['num_bytes'] / 1e6:.1f} MB)")
        if cache
        else "none",
    }
    table = Table(title=f"Mosaic {facts['mosaic']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _device_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="GPUs", title_justify="left")
    for heading in ("", "name", "CC", "memory (GiB)", "SMs", "slots", "SMs a slot", "left over", "fine slots"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for device in devices:
        slots, fine = device["slots"] or {}, device["fine_slots"]
        table.add_row(
            str(device["ordinal"]),
            escape(device["name"]),
            device["compute_capability"],
            f"{device['total_memory_bytes'] / 2**30:.0f}",
            str(device["num_sms"]),
            *(str(slots.get(name, "-")) for name in ("num_slots", "sms_per_slot", "remainder_sms")),
            f"{fine['num_slots']} of {fine['sms_per_slot']}" if fine else "-",
        )
    return table


def examine_node(folder: Path, *, root: Path = Path("/")) -> Diagnosis:
    """Examines this machine for unattended runs of the recipe in ``folder``; changes nothing.

    Args:
        folder: The recipe's folder; ``mosaic retrain check`` reports a missing or invalid recipe.
        root: Root of the machine's files.
    """
    folder = folder.resolve()
    findings = [*_disk(folder), *_file_system(folder, root), *_logout(root), *_gpu_memory()]
    title = f"[bold]Unattended runs in {escape(str(folder))}[/bold]"
    return Diagnosis({"folder": str(folder)}, _sorted(findings), (title,))


def _disk(folder: Path) -> Iterator[Finding]:
    free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    try:
        keep = int(tomllib.loads(_text(folder / "retrain.toml"))["budget"]["keep"])
    except (KeyError, TypeError, ValueError):  # none, or wrong, which `mosaic retrain check` reports
        keep = 2
    checkpoints = [
        sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        for checkpoint in folder.glob("days/*/checkpoints/*")
    ]
    largest = max(checkpoints, default=0)
    if not checkpoints:
        remedy = f"leave room for {keep + 2} checkpoints (three times the model, with AdamW) and the export"
        yield Finding("note", f"{_size(free_bytes)} are free; the first run shows how large a checkpoint is", remedy)
    elif free_bytes < (needed := (keep + 2) * largest):
        text = f"{_size(free_bytes)} are free, and {keep + 2} checkpoints of {_size(largest)} need {_size(needed)}"
        yield Finding("error", text, "delete old days' checkpoints and old versions, or lower budget.keep")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.0f} MiB"


def _file_system(folder: Path, root: Path) -> Iterator[Finding]:
    kind = ""
    for line in _text(root / "proc/self/mountinfo").splitlines():  # later lines cover earlier ones
        mount, _, source = line.partition(" - ")
        if source and folder.is_relative_to(mount.split()[4].replace("\\040", " ")):
            kind = source.split()[0]
    if kind in _NETWORK or kind.startswith("fuse."):
        remedy = "start runs from one machine only (the lease names its holder), or move the folder to a local disk"
        yield Finding("warning", f"the folder lies on {kind}, where other machines may not see its locks", remedy)
    if kind in _EPHEMERAL:
        text = f"the folder lies on {kind}, which a restart of the machine or container empties"
        yield Finding("warning", text, "move it to a disk that stays, such as a mounted volume")
    shm = root / "dev/shm"
    if shm.is_dir() and (size := shutil.disk_usage(shm).total) < _MIN_SHM_BYTES:
        remedy = "give the container more (docker: --shm-size=8g; Kubernetes: emptyDir in memory), or set workers = 0"
        yield Finding("warning", f"/dev/shm has {_size(size)}, through which loader workers pass batches", remedy)


def _logout(root: Path) -> Iterator[Finding]:
    user = getpass.getuser()
    has_systemd, linger = (root / "run/systemd/system").is_dir(), root / "var/lib/systemd/linger" / user
    if has_systemd and user != "root" and not linger.exists():
        remedy = f"with user units: loginctl enable-linger {user}; system units need nothing"
        yield Finding("note", f"units of the user {user} end when {user} logs out", remedy)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gpu_memory() -> Iterator[Finding]:
    """Yields memory errors of each GPU from NVML; nothing if NVML does not respond."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library or no permission: `mosaic doctor` reports which
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # unsupported by this GPU, or not permitted
                # Corrected and uncorrected rows; a row waits for a reset; a row could not be replaced.
                if any(pynvml.nvmlDeviceGetRemappedRows(pynvml.nvmlDeviceGetHandleByIndex(index))[2:]):
                    remedy = "`nvidia-smi -r` when no process uses it, or restart; exchange it if that does not help"
                    yield Finding("error", f"GPU {index}: rows of its memory failed and wait to be replaced", remedy)
    except pynvml.NVMLError:
        return
    finally:
        pynvml.nvmlShutdown()


def _sorted(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: tuple(_STYLES).index(finding.severity)))
