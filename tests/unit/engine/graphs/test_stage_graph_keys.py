"""Keys of captures: when a call is replayed, captured anew, let go, or left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import pair_batch, tower
from stage_graph_cases import bench, one_thread  # noqa: F401
from torch import nn

from mosaic.engine.graphs import Eager, StageGraphs
from mosaic.errors import MosaicError

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(count: int, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width)


@torch.no_grad()
def test_a_new_shape_is_captured_anew_and_an_old_one_is_not():
    model = tower()
    with bench() as ours:
        for count in (4, 5, 4, 5, 5):
            x = rows(count)
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 2
        assert ours.graphs.num_replays == 5


def test_training_evaluation_and_gradient_mode_are_captured_apart():
    model = tower(8, 16, nn.Dropout(0.5))
    x = rows(4)
    with bench() as ours:
        for _ in range(2):
            for training in (True, False):
                for grad in (True, False):
                    model.train(training)
                    with torch.set_grad_enabled(grad):
                        torch.manual_seed(1)
                        found = ours.call("tower", model, x)
                        torch.manual_seed(1)
                        assert torch.equal(found, model(x))
                        assert found.requires_grad is grad
                        del found
        assert ours.graphs.num_captures == 4
        assert ours.graphs.num_replays == 8


@torch.no_grad()
def test_plain_attributes_and_arguments_are_compared():
    class Scaled(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.by = 2.0

        def forward(self, x: torch.Tensor, shift: float) -> torch.Tensor:
            return x * self.by + shift

    model, x = Scaled(), rows(3)
    with bench() as ours:
        for by, shift in ((2.0, 0.0), (3.0, 0.0), (3.0, 1.0), (2.0, 0.0)):
            model.by = by
            assert torch.equal(ours.call("scaled", model, x, shift), model(x, shift))
        assert ours.graphs.num_captures == 3


@torch.no_grad()
def test_what_a_function_closes_over_is_compared():
    x = rows(3)
    with bench() as ours:
        for factor in (2.0, 3.0, 2.0):
            assert torch.equal(ours.call("scale", lambda x: x * factor, x), x * factor)  # noqa: B023
        assert ours.graphs.num_captures == 2


def test_freezing_a_part_captures_anew():
    model = tower()
    x = rows(3)
    with bench() as ours:
        for frozen in (False, True, True):
            model[0].requires_grad_(not frozen)
            model.zero_grad()
            ours.call("tower", model, x).sum().backward()
            assert (model[0].weight.grad is None) is frozen
            assert model[2].weight.grad is not None
        assert ours.graphs.num_captures == 2


@torch.no_grad()
def test_parameters_that_move_are_captured_anew_and_those_that_are_written_to_are_not():
    model, x = tower(), rows(3)
    with bench() as ours:
        for _ in range(3):
            model[0].weight.add_(1)
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 1
        model.load_state_dict(copy.deepcopy(tower().state_dict()), assign=True)
        for _ in range(2):
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 2
        model[0].weight.data = model[0].weight.data * 2
        assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 3


@torch.no_grad()
def test_a_submodule_that_is_replaced_is_captured_anew():
    model, x = tower(), rows(3)
    with bench() as ours:
        for _ in range(2):
            assert torch.equal(ours.call("tower", model, x), model(x))
        model[1] = nn.ReLU()
        assert torch.equal(ours.call("tower", model, x), model(x))


@torch.no_grad()
def test_a_module_whose_parameters_change_at_each_call_is_left_alone():
    model, x = tower(), rows(3)
    with bench() as ours:
        for _ in range(6):
            model[0].weight = nn.Parameter(torch.randn(16, 8))
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 3
        assert "changes from call to call: its '0.weight' was replaced" in ours.graphs.refused["tower"]


@torch.no_grad()
def test_a_branch_with_ever_new_shapes_is_left_alone():
    model = tower()
    with bench() as ours:
        for count in range(1, 21):
            x = rows(count)
            torch.testing.assert_close(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 12
        assert "no graph of the last ones was used twice" in ours.graphs.refused["tower"]


@torch.no_grad()
def test_what_was_not_used_for_longest_is_let_go():
    model = tower()
    with bench(max_graphs=2) as ours:
        for count in (3, 4, 3, 5, 3, 4):  # 5 drives 4 out
            x = rows(count)
            assert torch.equal(ours.call("tower", model, x), model(x))
        assert ours.graphs.num_captures == 4
        assert len(ours.graphs._stages) == 2


def test_what_is_let_go_in_flight_can_still_go_backward():
    model = tower()
    x = rows(3)
    with bench(max_graphs=1) as ours:
        kept = ours.call("tower", model, x).square().sum()
        ours.call("tower", model, rows(4))
        kept.backward()
        found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_a_second_forward_before_the_backward_of_the_first_runs_eagerly():
    model = tower()
    first, second = rows(3), rows(3)
    with bench() as ours:
        one = ours.call("tower", model, first)
        other = ours.graphs.run("tower", [ours.branch("tower", model, second)])[0]
        assert isinstance(other, Eager)
        assert "has not gone backward yet" in other.reason
        one.square().sum().backward()
        assert ours.graphs.refused == {}
        assert ours.graphs.eager_calls["tower", other.reason] == 1
        assert not isinstance(ours.graphs.run("tower", [ours.branch("tower", model, second)])[0], Eager)
        found = model[0].weight.grad.clone()
    model.zero_grad()
    model(first).square().sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_results_that_are_let_go_do_not_wait_for_a_backward():
    model = tower()
    with bench() as ours:
        for _ in range(3):
            ours.call("tower", model, rows(3))
        assert ours.graphs.num_replays == 3


def test_a_graph_that_is_retained_keeps_its_activations():
    model = tower()
    x, y = rows(3), rows(3)
    with bench() as ours:
        loss = ours.call("tower", model, x).square().sum()
        loss.backward(retain_graph=True)
        reason = ours.graphs.run("tower", [ours.branch("tower", model, y)])[0]
        assert isinstance(reason, Eager)
        loss.backward()
        found = model[0].weight.grad.clone()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(found, model[0].weight.grad)


def test_going_backward_a_second_time_after_another_forward_is_an_error():
    model = tower()
    with bench() as ours:
        out = ours.call("tower", model, rows(3))
        out.sum().backward()
        ours.call("tower", model, rows(3))
        with pytest.raises(RuntimeError, match="'tower', whose activations may be overwritten"):
            out.sum().backward()


def test_closing_ends_everything():
    model = tower()
    with bench() as ours:
        out = ours.call("tower", model, rows(3))
        ours.graphs.close()
        ours.graphs.close()
        with pytest.raises(MosaicError, match="are closed; run backward before"):
            out.sum().backward()
        with pytest.raises(MosaicError, match="are closed; colocate"):
            ours.call("tower", model, rows(3))


def test_the_user_s_batch_is_not_kept_alive():
    import weakref

    model = tower()
    with bench() as ours:
        x = pair_batch()[0].requires_grad_()
        alive = weakref.ref(x)
        ours.call("tower", model, x).sum().backward()
        del x
        assert alive() is None


def test_no_graph_at_all_is_refused():
    with bench() as ours, pytest.raises(ValueError, match="max_graphs=0"):
        StageGraphs(ours.runtime, max_graphs=0)
