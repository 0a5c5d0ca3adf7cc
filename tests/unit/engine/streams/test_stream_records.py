"""Streams: errors inside modules, the timeline, what describe says, and what is left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch
from stream_cases import Projected, colocated, steps

from mosaic.engine import Handle


@pytest.mark.parametrize("stages", [SIDE_BY_SIDE, [{"left": 2}, {"right": 1}]], ids=["side by side", "sharing slots"])
def test_a_graph_that_the_user_captures_leaves_the_handle_and_the_model_as_they_were(stages: Any):
    model = TwoTowers()
    x, y = pair_batch()
    with colocated(model, (x, y), stages, num_slots=3) as (handle, backend):
        steps(model)
        handle.clear_timeline()
        model.forward = lambda x, y: forward(x * next(model.left.parameters())[0, 0], y)  # type: ignore[method-assign]
        forward = type(model).forward.__get__(model)
        expected = torch.autograd.grad(model(x, y).sum(), list(model.parameters()))
        graph, stream = backend.api.new_graph(), backend.api.new_stream()
        backend.api.release_workspaces()
        with backend.api.capture(graph, stream=stream, pool=backend.api.new_graph_pool()):
            found = torch.autograd.grad(model(x, y).sum(), list(model.parameters()))
        backend.api.release_workspaces()
        next(model.left.parameters()).sum().backward()  # where a backward of the module would end
        assert handle.timeline().spans
        assert handle.metrics()
        model.state_dict()
        backend.api.synchronize()
        graph.replay()
        assert all(map(torch.equal, found, expected))
        steps(model)


def test_an_interrupt_leaves_the_loop_its_stream_and_a_model_that_can_be_saved(monkeypatch: pytest.MonkeyPatch):
    model = TwoTowers()
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, backend):
        steps(model)

        def interrupt(*_: object) -> None:
            monkeypatch.undo()
            backend.api.use_stream(handle._executor.lanes.lane((0,)).stream).__enter__()
            raise KeyboardInterrupt

        for target in ("version_of", "tagged"):
            monkeypatch.setattr(f"mosaic.engine.streams.executor.{target}", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(*pair_batch())
            assert backend.api.current_stream() == backend.api.main
            assert len(model.state_dict()) == 10
            steps(model)


def test_the_timeline_has_a_forward_and_a_backward_of_every_module_and_step():
    model = Projected(2)
    with colocated(model, pair_batch(), [{"towers.0": 1, "towers.1": 1}, {"head": 2}]) as (handle, _):
        handle.clear_timeline()
        steps(model, num_steps=4)
        spans = handle.timeline().spans
        names = ("towers.0", "towers.1", "head")
        assert sorted((s.module, s.phase, s.step) for s in spans) == sorted(
            (name, phase, step) for name in names for phase in ("forward", "backward") for step in range(4)
        )
        assert all(span.end_ms >= span.start_ms >= 0 for span in spans)
        assert [span.start_ms for span in spans] == sorted(span.start_ms for span in spans)
        by_key = {(s.module, s.phase, s.step): s for s in spans}
        assert all(by_key[n, "backward", s].start_ms >= by_key[n, "forward", s].end_ms for n in names for s in range(4))
        assert handle.metrics()["steps"] == 4
        handle.clear_timeline()
        assert handle.timeline().spans == ()


def test_nothing_that_a_step_made_outlives_it():
    model = TwoTowers()

    def step(handle: Handle) -> list[weakref.ref[torch.Tensor]]:
        x, y = pair_batch()
        left = model.left(x)
        glue = left * 2
        (glue @ model.right(y).T).sum().backward()
        out = model(x, y)
        out.sum().backward()
        return [weakref.ref(t) for t in (x, left, left._plain, glue, glue._plain, out)]

    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        gc.disable()
        try:
            for _ in range(2):
                made = step(handle)
            assert [ref() for ref in made] == [None] * len(made)
        finally:
            gc.enable()
