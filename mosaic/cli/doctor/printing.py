"""Printing of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from mosaic.cli.doctor.report import Diagnosis, Severity

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The worst first."""
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def print_findings(findings: Sequence[Diagnosis], console: Console) -> None:
    """Prints findings with their remedies."""
    if not findings:
        console.print("\nNothing to do.")
        return
    console.print("\n[bold]What to know, and what to do[/bold]")
    for finding in findings:
        style = _STYLES[finding.severity]
        _print_indented(f"[{style}]{finding.severity}[/{style}]: {escape(finding.what)}", 2, console)
        _print_indented(f"-> {escape(finding.todo)}", 4, console)


def _print_indented(text: str, columns: int, console: Console) -> None:
    # A console that leaves wrapping to the terminal keeps a line whole; padding would break it.
    console.print(" " * columns + text if console.soft_wrap else Padding(text, (0, 0, 0, columns)))
