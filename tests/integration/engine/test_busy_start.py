"""A loop that starts on a machine too busy to profile on runs as it was; commands that measure say that they cannot."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import FAST, Trap, TwoTowers, pair_batch
from rich.console import Console
from user_models import FILE

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.cli.main import run
from mosaic.demo.run import DemoSettings, colocate_and_show
from mosaic.errors import UnstableMeasurementError
from mosaic.profiler.measuring import measure as measuring
from mosaic.report.progress import Progress


def share_of_others(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says of every measurement that others took this share of the CPU; FAST refuses above 2."""

    class Load:
        def __init__(self) -> None:
            self.share = share

    monkeypatch.setattr(measuring, "ForeignLoad", Load)


def begin(model: TwoTowers, **options: Any) -> mosaic.Handle:
    given = mosaic.Options(**{"cache": None, "profiling": FAST, **options})
    return mosaic.colocate(model, sample=pair_batch(), backend=HostBackend(num_slots=2), options=given)


def weights_after(model: TwoTowers, steps: int = 3) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(*pair_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_a_loop_that_starts_on_a_busy_machine_runs_as_it_was_and_says_so_once(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    share_of_others(3.0, monkeypatch)
    plain = weights_after(copy.deepcopy(model))
    with caplog.at_level(logging.WARNING, logger="mosaic"):
        handle = begin(model)
        ours = weights_after(model)
    assert [type(model.left), handle.active, handle.is_trying, handle.profile] == [Trap, False, False, None]
    assert all(torch.equal(plain[name], tensor) for name, tensor in ours.items())
    assert [stage.names for stage in handle.plan.stages] == [("left",), ("right",)]
    assert {placed.quota for placed in handle.plan.placements} == {2}
    assert handle.plan.search.method == "sequential"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "were not profiled, so the model runs as it was until the next start: other processes took 300%" in warning
    assert "stop them, measure later, give a profile or a plan, or allow more" in warning
    assert warning in handle.describe().splitlines()
    assert handle.describe().startswith("the model runs as it was:")
    handle.remove()


def test_a_loop_without_memory_for_measurements_runs_as_it_was_and_says_so(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch
):
    def exhaust(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(measuring, "run_step", exhaust)
    handle = begin(model)
    assert type(model.left) is Trap
    assert "'left' ran at no quota; it raised out of memory: no more. Mend" in handle.describe()
    handle.remove()


def test_a_busy_machine_is_an_error_where_that_is_asked_for_or_a_planner_is(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch
):
    share_of_others(3.0, monkeypatch)
    for options in ({"if_busy": "raise"}, {"method": "spindle"}):
        with pytest.raises(UnstableMeasurementError, match="above 200% a profile means nothing"):
            begin(model, **options)
    with pytest.raises(ValueError, match=r"if_busy='wait'; use \"plain\" or \"raise\""):
        begin(model, if_busy="wait")
    assert type(model.left) is Trap


def test_what_is_kept_needs_no_measuring_on_a_busy_machine(
    model: TwoTowers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    share_of_others(0.0, monkeypatch)
    first = begin(model, cache=tmp_path)
    first.remove()
    share_of_others(3.0, monkeypatch)
    second = begin(model, cache=tmp_path)
    second.remove()
    assert first.profile is not None
    assert second.profile is not None
    assert second.profile.samples == first.profile.samples


@pytest.mark.parametrize("command", ["profile", "plan", "run"])
def test_commands_that_measure_end_with_the_error(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    share_of_others(0.9, monkeypatch)
    output = tmp_path / "output"
    assert run([command, "--model", f"{FILE}:make", "--output", str(output)]) == 1
    assert "other processes took 90%" in " ".join(capsys.readouterr().err.split())
    assert not output.is_file()


def test_the_demo_shows_no_figures_of_a_busy_machine(model: TwoTowers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    share_of_others(0.9, monkeypatch)
    batch: Any = pair_batch()
    settings, quiet = DemoSettings(output=tmp_path, cache=tmp_path), Console(quiet=True)
    with pytest.raises(UnstableMeasurementError, match="took 90%"):
        colocate_and_show(model, batch, settings, HostBackend(num_slots=2), Progress(quiet), quiet)
