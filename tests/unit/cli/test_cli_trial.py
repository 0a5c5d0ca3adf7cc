"""What `mosaic run` says it measured."""

from __future__ import annotations

from mosaic.cli.run import MeasuredInTurn


def trial(*, active: bool, speedup: float | None, note: str = "") -> MeasuredInTurn:
    return MeasuredInTurn(
        description="",
        active=active,
        step_ms_plain=20.0,
        plain_waiting="passively",
        step_ms_colocated=10.0,
        speedup=speedup,
        overlap=0.0,
        metrics={},
        foreign_cpu_share=None,
        note=note,
    )


def test_no_speedup_is_claimed_where_the_model_runs_as_it_was():
    assert trial(active=False, speedup=None).figures()["speedup"] == "none: the model runs as it was"
    assert trial(active=True, speedup=2.0).figures()["speedup"] == 2.0
    assert trial(active=True, speedup=2.0, note="busy").figures()["speedup"] == "2.000 (busy)"
