"""Algorithm 1: what may be merged, what is merged first, and what pruning and caching do."""

from __future__ import annotations

from planning_cases import flat, linear, profile_of

from mosaic.cost import CostModel
from mosaic.profile import Profile
from mosaic.solver.gahc.clustering import GahcResult, cluster, reachable, sort_stages
from mosaic.solver.gahc.placement import Machine
from mosaic.solver.gahc.stage_eval import StageEvaluator
from mosaic.solver.options import all_options

A, B, C, D = 1, 2, 4, 8


def cluster_profile(profile: Profile, *, prune: bool = True, cache: bool = True) -> GahcResult:
    cost = CostModel.from_profile(profile)
    options = all_options(profile.graph, cost=cost, device=profile.device, num_devices=1)
    machine = Machine(num_devices=1, num_slots=profile.device.num_slots, memory_bytes=0)
    return cluster(profile.graph, StageEvaluator(options, cost=cost, machine=machine), prune=prune, cache=cache)


def stages_of(result: GahcResult) -> list[set[str]]:
    return [set(stage.choices) for stage in result.stages]


def test_modules_that_do_not_need_the_whole_device_share_a_stage() -> None:
    assert stages_of(cluster_profile(profile_of({"a": flat(4), "b": flat(3)}, num_slots=2))) == [{"a", "b"}]


def test_modules_that_scale_perfectly_stay_apart() -> None:
    # Side by side they take just as long: a gain of zero merges nothing (line 15).
    assert stages_of(cluster_profile(profile_of({"a": linear(4), "b": linear(4)}, num_slots=2))) == [{"a"}, {"b"}]


def test_the_pair_with_the_greatest_gain_is_merged_first() -> None:
    times = {"a": flat(1), "b": flat(9), "c": flat(8)}
    assert stages_of(cluster_profile(profile_of(times, num_slots=2))) == [{"a"}, {"b", "c"}]


def test_of_equal_gains_the_first_pair_is_merged() -> None:
    times = dict.fromkeys("abcd", flat(5))
    assert stages_of(cluster_profile(profile_of(times, num_slots=2))) == [{"a", "b"}, {"c", "d"}]


def test_merging_goes_on_until_no_merge_gains() -> None:
    assert stages_of(cluster_profile(profile_of(dict.fromkeys("abcd", flat(5)), num_slots=4))) == [set("abcd")]


def test_a_module_is_never_merged_with_one_that_it_depends_on_directly_or_not() -> None:
    profile = profile_of(dict.fromkeys("abc", flat(5)), num_slots=3, edges=[("a", "b"), ("b", "c")])
    assert stages_of(cluster_profile(profile)) == [{"a"}, {"b"}, {"c"}]


def test_a_merge_that_would_close_a_cycle_through_other_stages_is_left_out() -> None:
    # a -> b and c -> d: once {a, d} is a stage, {b, c} would both follow and precede it.
    times = {"a": flat(9), "b": flat(5), "c": flat(5), "d": flat(9)}
    profile = profile_of(times, num_slots=2, edges=[("a", "b"), ("c", "d")])
    assert stages_of(cluster_profile(profile)) == [{"c"}, {"a", "d"}, {"b"}]


def test_stages_come_out_in_topological_order() -> None:
    times = {"head": flat(7), "x": flat(3), "y": flat(4)}
    profile = profile_of(times, num_slots=2, edges=[("x", "head"), ("y", "head")])
    assert stages_of(cluster_profile(profile)) == [{"x", "y"}, {"head"}]


def test_pruning_and_caching_change_the_counters_and_not_the_answer() -> None:
    times = {"a": linear(3), "b": flat(4), "c": lambda d, q: 1 + 5 / q, "d": flat(2), "e": linear(9)}
    profile = profile_of(times, num_slots=4, edges=[("a", "e")])
    full, bare = cluster_profile(profile), cluster_profile(profile, prune=False, cache=False)
    uncached, unpruned = cluster_profile(profile, cache=False), cluster_profile(profile, prune=False)
    assert full.stages == bare.stages == uncached.stages == unpruned.stages
    assert full.num_evaluations < bare.num_evaluations
    assert full.num_pruned > 0 == bare.num_pruned
    assert unpruned.num_cache_hits > 0 == bare.num_cache_hits
    assert unpruned.num_evaluations + unpruned.num_cache_hits == bare.num_evaluations


def test_reachability_follows_edges_through_stages_in_between() -> None:
    assert reachable([A, B, C, D], [(A, B), (B, D)]) == [0b1010, 0b1000, 0, 0]


def test_stages_sort_producers_first_and_else_by_earliest_module() -> None:
    assert sort_stages([D, A | C, B], [(D, A), (A, B)]) == [D, A | C, B]
    assert sort_stages([C, B, A], []) == [A, B, C]
