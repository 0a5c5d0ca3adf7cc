"""What `mosaic run` says it measured on several ranks, and what it refuses."""

from __future__ import annotations

from io import StringIO

import pytest
from planning_cases import device_of, graph_of
from rich.console import Console

from mosaic.cli import main
from mosaic.cli.run import measured_table
from mosaic.plan import plan_from_quotas
from mosaic.ranks.compare import MeasuredMethod

PLAN = plan_from_quotas([{"a": 2}], graph=graph_of("a"), device=device_of(2))


def printed(*found: MeasuredMethod) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(measured_table(found))
    return console.file.getvalue()


def test_the_table_fits_and_keeps_measured_and_predicted_apart():
    text = printed(
        MeasuredMethod(
            method="distmm",
            plan=PLAN,
            step_ms=(10.0, 12.0, 14.0),
            ddp_ms=(6.0, 8.0, 9.0),
            ratios=(1.4, 1.5, 1.6),
            sent_bytes={"forward": 1e6, "backward": 2e6, "reduce": 5e5},
            held_bytes=(2_000_000, 3_000_000),
            ddp_held_bytes=(4_000_000, 4_000_000),
        ),
        MeasuredMethod(
            method="distmm",
            plan=PLAN,
            same_as="exact",
            step_ms=(1.0,),
            ddp_ms=(1.0,),
            ratios=(1.0,),
            held_bytes=(1,),
            ddp_held_bytes=(1,),
        ),
        MeasuredMethod(method="brute_force", reason="too many modules"),
    )
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("distmm"))
    assert row == ["distmm", "12.0", "8.0", "1.50", "-", "3.50", "3.0", "(4.0)"]
    assert "dicted" in text
    assert "distmm: the same plan as exact" in text
    assert "brute_force: too many modules" in text


@pytest.mark.parametrize("extra", [["--plan", "p.json"], ["--method", "gahc"]])
def test_comparing_all_methods_and_naming_one_is_refused(extra: list[str], capsys: pytest.CaptureFixture[str]):
    assert main.run(["run", "--model", "zoo:clip-tiny", "--compare", *extra]) == 2
    assert "leave --plan and --method out" in capsys.readouterr().err
