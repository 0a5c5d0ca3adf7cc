"""``mosaic doctor --model FILE:FACTORY``: a model's modules, and remedies for those that cannot be placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from mosaic.cli.doctor.printing import print_findings
from mosaic.cli.doctor.report import Diagnosis, Severity

if TYPE_CHECKING:
    from mosaic.engine.finding.trace import Remark


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Diagnosis of a model."""

    model: str
    """FILE:FACTORY of the command line."""
    modules: dict[str, tuple[str, ...]]
    """Modules that can be placed, each with its predecessors."""
    findings: tuple[Diagnosis, ...]
    """``error``: it cannot be colocated; ``warning``: a module runs in place; ``note``: good to know."""

    @property
    def refused(self) -> bool:
        """True if the model cannot be colocated."""
        return any(finding.severity == "error" for finding in self.findings)


def examine_model(where: str) -> ModelReport:
    """Constructs the model and examines it.

    Raises:
        MosaicError: It cannot be constructed.
    """
    from mosaic.cli.workload import load_workload
    from mosaic.engine.examine import examine

    workload = load_workload(where)
    examination = examine(workload.model, workload.sample, origin=where)
    by_severity: tuple[tuple[Severity, tuple[Remark, ...]], ...] = (
        ("error", examination.refused),
        ("warning", examination.in_place),
        ("note", examination.to_know),
    )
    findings = [
        Diagnosis(severity=severity, what=remark.seen, todo=remark.todo)
        for severity, remarks in by_severity
        for remark in remarks
    ]
    return ModelReport(model=where, modules=examination.modules, findings=tuple(findings))


def render(report: ModelReport, console: Console) -> None:
    """Prints the report."""
    console.print(f"[bold]{escape(report.model)}[/bold]")
    console.print("\n[bold]What can be placed[/bold]" if report.modules else "\n[bold]Nothing can be placed.[/bold]")
    for name, sources in report.modules.items():
        waits = f", after {', '.join(sources)}" if sources else ""
        console.print(f"  - {escape(name + waits)}")
    print_findings(report.findings, console)
