"""Several ranks on streams: routed calls on lanes' streams, equal to data-parallel training, in one order, no race."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.cases import run_ranks


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("ranks.programs.calls.streams:observed", 2, tmp_path_factory.mktemp("ranks"))


def test_random_graphs_under_random_layouts_on_streams_train_as_data_parallel_training(observed: list[dict[str, Any]]):
    for found in observed:
        for case in (*found["layouts"], found["everywhere"]):
            assert max(case["loss"], case["parameters"]) < 1e-4, case
        assert [case["routes"] for case in (*found["layouts"], found["everywhere"])] == [True] * 4 + [False]


def test_a_rank_without_a_modality_has_the_gradients_of_data_parallel_training(observed: list[dict[str, Any]]):
    assert max(found["lacking"] for found in observed) < 1e-5


def test_rows_travel_from_the_stream_of_the_module_s_lane_and_so_do_its_gradients_sums(observed: list[dict[str, Any]]):
    for found in observed:
        order = found["order"]
        routed = [
            (order["groups"][group], stream)
            for kind, group, stream, in_backward in order["issued"]
            if kind == "all_to_all" and not in_backward
        ]
        assert {name for name, _ in routed} >= {"image", "text", "audio"}
        assert all(stream == order["lanes"][name] for name, stream in routed if name in order["lanes"])
        sums = {stream for kind, _, stream, in_backward in order["issued"] if kind == "all_reduce" and in_backward}
        assert order["lanes"]["audio"] in sums, "the audio tower is on both ranks"
        assert 0 not in sums, "the loop's own stream starts sums only once the backward has ended"


def test_all_ranks_launch_the_collectives_of_all_communicators_in_one_order(observed: list[dict[str, Any]]):
    first, second = ([tuple(one[:2]) for one in found["order"]["issued"]] for found in observed)
    both = {group for _, group in first} & {group for _, group in second}
    assert [one for one in first if one[1] in both] == [one for one in second if one[1] in both]
    assert len(both) >= 5


def test_the_backward_of_a_call_lies_behind_those_of_all_later_calls(observed: list[dict[str, Any]]):
    for found in observed:
        assert found["order"]["behind"] == [1, 2, 3, 4, 5]


def test_the_loop_s_stream_waits_for_lanes_at_the_end_of_a_backward(observed: list[dict[str, Any]]):
    assert all(found["order"]["joined"] for found in observed)


def test_a_rank_records_when_its_own_modules_ran_and_says_what_was_not_tried(observed: list[dict[str, Any]]):
    first, second = (found["order"] for found in observed)
    assert "backward image" in first["spans"]
    assert "forward image" not in second["spans"]
    assert "forward text" in second["spans"]
    assert "has not run on several GPUs" in first["described"]


def test_what_cannot_be_routed_is_refused(observed: list[dict[str, Any]]):
    for found in observed:
        by_name, differing = found["refused"]
        assert "all ranks take part in a whole backward" in by_name
        assert "'image' is called on different ranks" in differing
