"""``mosaic doctor``: diagnoses this machine, a model, or the ranks of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.markup import escape
from tyro.conf import arg

import mosaic
from mosaic.cli.options import Json, OptionalModel, console_beside, write_json
from mosaic.errors import BackendUnavailableError, CudaError, UnsupportedModelError
from mosaic.report.table import make_table

Severity = Literal["error", "warning", "note"]
"""``error``: it cannot run; ``warning``: partitions or modules may be slow; ``note``: information."""
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    description: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    facts: dict[str, Any]  # for --json
    findings: list[Finding] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)
    """Text and tables for the terminal, above the findings."""

    def find(self, severity: Severity, description: str, remedy: str) -> None:
        """Adds a finding; the most severe come first."""
        self.findings.append(Finding(severity, description, remedy))
        self.findings.sort(key=lambda finding: tuple(_STYLES).index(finding.severity))

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def print(self, console: Console) -> None:
        """Prints the blocks, then findings with their remedies."""
        console.print(*self.blocks, sep="\n")
        console.print("\n[bold]Findings and remedies[/bold]" if self.findings else "\nNothing to do.")
        for finding in self.findings:
            style = _STYLES[finding.severity]
            console.print(f"  [{style}]{finding.severity}[/{style}]: {escape(finding.description)}")
            console.print(f"    -> {escape(finding.remedy)}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report the devices of this machine, which features work, what is missing, and how to get it.

    Exits with 0 even without a GPU. --model diagnoses a model instead. It lists the modules that can be placed and, for
    each of the others, the line of code and a remedy. It exits with 1 if the model cannot be colocated. --trace
    compares the ranks of a run and names the slow ones.
    """

    model: OptionalModel = None
    trace: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """Traces of a run's ranks, from handle.write_trace(folder): the files, or the folder."""
    json: Json = None

    def execute(self) -> None:
        if self.model is not None:
            diagnosis = examine_model(self.model)
        else:
            diagnosis = examine_traces(self.trace) if self.trace else examine_machine()
        facts = {**diagnosis.facts, "findings": [asdict(finding) for finding in diagnosis.findings]}
        write_json(json.dumps(facts, indent=2) + "\n", self.json)
        console = console_beside(self.json)
        console.soft_wrap = True  # the terminal wraps sentences
        diagnosis.print(console)
        if self.model is not None and diagnosis.has_errors:
            raise UnsupportedModelError(f"{self.model} cannot be colocated; see the findings above")


def examine_model(where: str) -> Diagnosis:
    """Builds a model, ``FILE:FACTORY`` or the zoo's; lists modules that can be placed, and reasons for the others."""
    from mosaic.cli.workload import load_workload
    from mosaic.engine.examine import examine

    workload = load_workload(where)
    examination = examine(workload.model, workload.sample, origin=where)
    title = "Modules that can be placed" if examination.modules else "No module can be placed."
    lines = [f"[bold]{escape(where)}[/bold]\n", f"[bold]{title}[/bold]"]
    for name, sources in examination.modules.items():
        lines.append(f"  - {escape(name)}" + (f", after {escape(', '.join(sources))}" if sources else ""))
    diagnosis = Diagnosis({"model": where, "modules": examination.modules}, blocks=["\n".join(lines)])
    for description, remedy in examination.refused.items():
        diagnosis.find("error", description, remedy)
    for description, remedy in examination.in_place.items():
        diagnosis.find("warning", description, remedy)
    return diagnosis


def examine_traces(paths: tuple[Path, ...]) -> Diagnosis:
    """Compares the ranks of a run from their traces."""
    from mosaic.artifact import load
    from mosaic.report.slow_ranks import compare_ranks
    from mosaic.timeline import RankTrace

    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    comparison = compare_ranks([load(RankTrace, file) for file in files])
    sentences = comparison.sentences()
    blocks = [comparison.table(), *map(escape, sentences[len(comparison.slow) :])]
    diagnosis = Diagnosis({**asdict(comparison), "sentences": sentences}, blocks=blocks)
    for sentence in sentences[: len(comparison.slow)]:
        diagnosis.find("warning", sentence, "check the clocks, temperatures and other processes of that machine")
    return diagnosis


def examine_machine(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Examines devices, driver and torch without importing torch. A broken driver becomes a finding."""
    facts: dict[str, Any] = {"mosaic": mosaic.__version__, "platform": platform.platform()}
    facts |= {"python": platform.python_version(), "num_cores": len(os.sched_getaffinity(0)), "torch": _torch()}
    facts |= {"extension_loads": False, "driver": None, "devices": []}
    diagnosis = Diagnosis(facts)
    _examine_driver(diagnosis)
    _examine_settings(diagnosis, environ)
    if facts["torch"] and not facts["torch"]["cuda"] and facts["devices"]:
        text = f"torch {facts['torch']['version']} is built without CUDA, but this machine has a GPU"
        diagnosis.find("warning", text, "install a CUDA build: https://pytorch.org/get-started/locally/")
    facts["works"] = ["planning for any described device (`mosaic plan`); it needs no GPU"]
    if facts["torch"]:
        commands = "`mosaic demo`, `mosaic profile`, `mosaic run`"
        facts["works"].append(f"the host backend: modules side by side on CPU cores ({commands})")
        if facts["torch"]["cuda"] and facts["devices"] and not diagnosis.has_errors:
            text = "the cuda backend: modules side by side on SM partitions (`mosaic bench` measures it)"
            facts["works"].append(text)
    diagnosis.blocks.extend(_blocks(facts))
    return diagnosis


def _examine_driver(diagnosis: Diagnosis) -> None:
    """Sets the facts ``extension_loads``, ``driver`` and ``devices``."""
    from mosaic.backends.cuda import driver as cuda

    facts = diagnosis.facts
    try:
        cuda.require_extension()
    except BackendUnavailableError as error:
        remedy = "run `pip install .` in Mosaic's folder; it needs g++ and Python's headers"
        diagnosis.find("error", f"the extension mosaic._C does not load: {error.found}", remedy)
        return
    facts["extension_loads"] = True
    try:
        driver = cuda.describe_driver()
        facts["driver"] = asdict(driver)
        lost = cuda.lost_uses(driver)
        if missing := ", ".join(f"{call.name} ({call.since})" for call in driver.missing if call.use in lost):
            remedy = "install a driver for CUDA 12.5 or newer; this one cannot create streams on partitions of the SMs"
            diagnosis.find("error", f"the driver (CUDA {driver.version}) lacks {missing}", remedy)
        for device in cuda.describe_devices() if "base" not in lost else ():
            facts["devices"].append({**asdict(device), "slots": None})
            try:
                if "slots" not in lost:
                    facts["devices"][-1]["slots"] = asdict(cuda.CudaDriver(device.ordinal).describe_slots())
            except (BackendUnavailableError, CudaError) as error:
                remedy = "update the driver (CUDA 12.5 or newer); green contexts also need a 64-bit Linux"
                diagnosis.find("error", f"device {device.ordinal} cannot be split into slots: {error}", remedy)
    except BackendUnavailableError as error:
        remedy = "install a driver (CUDA 12.5 or newer), give the container its GPUs, check CUDA_VISIBLE_DEVICES"
        diagnosis.find("note", str(error), f"none if the machine has no NVIDIA GPU; otherwise {remedy}")
    except CudaError as error:
        remedy = "check `nvidia-smi`, then `dmesg`; after a driver update, reboot"
        diagnosis.find("error", str(error), remedy)


def _examine_settings(diagnosis: Diagnosis, environ: Mapping[str, str]) -> None:
    """Finds settings and other processes that defeat partitions, before the number of streams is known."""
    from mosaic.backends.cuda.environment import ask_nvml, find_in_process, find_on_device

    findings = [("", finding) for finding in find_in_process(environ)]
    for device in diagnosis.facts["devices"]:
        findings += [(f"device {device['ordinal']}: ", finding) for finding in find_on_device(ask_nvml(device["uuid"]))]
    for prefix, finding in findings:
        diagnosis.find("warning", f"{prefix}{finding.description}: {finding.rule}", finding.remedy)


def _torch() -> dict[str, str | None] | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # importing torch for its CUDA version takes a second
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return {"version": importlib.metadata.version("torch"), "cuda": cuda[1] if cuda else None}


def _blocks(facts: Mapping[str, Any]) -> list[Any]:
    """Returns a table of components, one of GPUs, and the list of working features."""
    torch, driver = facts["torch"], facts["driver"]
    cuda = f"with CUDA {torch['cuda']}" if torch and torch["cuda"] else "without CUDA"
    parts = {
        "machine": f"{facts['platform']}, Python {facts['python']}, CPU cores: {facts['num_cores']}",
        "torch": f"{torch['version']}, built {cuda}" if torch else "not installed",
        "extension": f"mosaic._C {'loads' if facts['extension_loads'] else 'does not load'}",
        "driver": f"CUDA {driver['version']}" if driver else "none",
    }
    rows = []
    for device in facts["devices"]:
        memory = f"{device['total_memory_bytes'] / 2**30:.0f} GiB"
        of = device["slots"]
        slots = f"{of['num_slots']} of {of['sms_per_slot']} SMs, {of['remainder_sms']} left over" if of else "-"
        name = f"{device['ordinal']}: {device['name']}"
        rows.append((name, device["compute_capability"], memory, str(device["num_sms"]), slots))
    gpus = make_table("GPUs", ("name", ">CC", ">memory", ">SMs", "slots"), rows)
    works = "\n".join(f"  - {escape(line)}" for line in facts["works"])
    return [
        make_table(f"Mosaic {facts['mosaic']}", ("part", "state"), parts.items()),
        gpus if rows else "[bold]No NVIDIA GPU can be used here.[/bold]",
        f"\n[bold]What works on this machine[/bold]\n{works}",
    ]
