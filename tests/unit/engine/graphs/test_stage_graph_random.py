"""Random numbers in graphs that are replayed in no order: captured where each graph has its own seed and offset."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import TwoTowers, assert_same, pair_batch, tower
from fake_streams import FakeStreams, RaceError
from stage_graph_cases import Bench, bench, by_graphs, one_thread, plainly, train  # noqa: F401
from torch import nn

from mosaic.engine.graphs import Eager

pytestmark = pytest.mark.usefixtures("one_thread")


def dropping() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers(tower(8, 16, nn.Dropout(0.3)), tower(8, 16, nn.Dropout(0.3)))


def beside(ours: Bench, model: TwoTowers) -> list[Any]:
    """Calls each tower on its lane, three times, in no order; returns what the graphs gave last."""
    found: list[Any] = []
    with torch.no_grad():
        for step in range(3):
            found.clear()
            for name, value in zip(("left", "right"), pair_batch(step), strict=True):
                branch = ours.branch(name, getattr(model, name), value)
                found.append(branch.lane.launch(lambda b=branch: ours.graphs.run(b.name, [b])[0]))
    return [ticket.wait() for ticket in found]


@pytest.mark.parametrize("apart", [True, False], ids=["one state a graph", "one for all"])
def test_unordered_graphs_that_draw_race_for_a_state_that_is_one_for_all(apart: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeStreams, "draws_apart", True)
    with bench() as ours:
        ours.runtime.generator = None if apart else torch.zeros(2)
        if not apart:
            with pytest.raises(RaceError, match="fill the generator's state"):
                beside(ours, dropping())
            return
        assert not any(isinstance(one, Eager) for one in beside(ours, dropping()))
        assert ours.graphs.num_replays == 6


def test_where_the_state_is_one_for_all_what_draws_runs_eagerly_and_everything_else_by_graph():
    with bench() as ours:
        ours.runtime.generator = torch.zeros(2)
        assert all(isinstance(one, Eager) for one in beside(ours, dropping()))
        assert list(ours.graphs.refused) == ["left", "right"]
        assert "it draws random numbers" in ours.graphs.refused["left"]
        assert "before torch 2.13" in ours.graphs.refused["left"]
        assert not any(isinstance(one, Eager) for one in beside(ours, dropping().eval()))
        assert ours.graphs.num_replays == 6


def test_where_the_state_is_one_for_all_training_equals_training_plainly():
    def step(model: Any, together: Any, number: int) -> torch.Tensor:
        x, y = pair_batch(number)
        left, right, plain = together(left=(model.left, x), right=(model.right, y), plain=(model.left[0], x))
        return (left * right + plain).square().mean()

    model = dropping()
    expected = train(copy.deepcopy(model), step, plainly)
    with bench() as ours:
        ours.runtime.generator = torch.zeros(2)
        assert_same(expected, train(model, step, by_graphs(ours)))
        assert list(ours.graphs.refused) == ["left", "right"]
        assert ours.graphs.num_replays == 5
