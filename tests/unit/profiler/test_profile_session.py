"""Measurements of this process: found again under another name, before a folder's, and taken from a profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning_cases import device_of, graph_of, pair, profile_of, sample

from mosaic.profile import ModuleMemory, Phase
from mosaic.profiler import ProfileCache, SessionCache
from mosaic.profiler.records import MeasuredPoint, ModuleKey, PairKey


def key(structure: str) -> ModuleKey:
    return ModuleKey(structure=structure, inputs="rows", device=device_of(2), torch_version="2", driver="")


def point(quota: int, time_ms: float, module: str = "m") -> MeasuredPoint:
    samples = tuple(sample(quota, time_ms, module=module, phase=phase) for phase in Phase)
    return MeasuredPoint(samples=samples, foreign_cpu_share=0.0)


@pytest.mark.parametrize("has_folder", [False, True])
def test_what_was_measured_is_found_under_any_name(has_folder: bool, tmp_path: Path):
    kept = SessionCache(ProfileCache(tmp_path) if has_folder else None)
    kept.add_module(key("tower"), [point(1, 4.0)], ModuleMemory(module="m", resident_bytes=8, activation_bytes=8))
    found = kept.module(key("tower"), "other")
    assert found.at(1, 1).samples[0].module == "other"
    assert found.memory.module == "other"
    assert kept.module(key("another"), "other").points == ()
    both = PairKey(modules=(key("tower"), key("another")), quotas=(1, 1))
    kept.add_pair(both, ["a", "b"], [pair("b", "a", 1.5, phase=Phase.FORWARD)])
    (beside,) = kept.pair(both, ["c", "d"])
    assert (beside.module, beside.beside) == ("d", "c")


def test_a_folder_is_told_and_asked(tmp_path: Path):
    folder = ProfileCache(tmp_path)
    folder.add_module(key("tower"), [point(1, 4.0), point(2, 3.0)], None)
    kept = SessionCache(folder)
    kept.add_module(key("tower"), [point(1, 5.0)], None)
    found = kept.module(key("tower"), "m")
    assert [found.at(1, quota).samples[0].median_ms for quota in (1, 2)] == [5.0, 3.0]
    assert folder.module(key("tower"), "m").at(1, 1).samples[0].median_ms == 5.0


def test_a_profile_that_was_given_is_learned_without_its_higher_degrees():
    pairs = [pair("b", "a", 1.5, phase=phase, quota=2, beside_quota=1) for phase in Phase]
    profile = profile_of(
        {"a": lambda degree, quota: 4.0 / quota, "b": lambda degree, quota: 2.0},
        num_slots=2,
        degrees=(1, 2),
        pairs=pairs,
    )
    assert profile.graph.names == graph_of(["a", "b"]).names
    kept = SessionCache()
    kept.learn(profile, {"a": key("tower"), "b": key("another")})
    found = kept.module(key("tower"), "m")
    assert [known.point for known in found.points] == [(1, 1), (1, 2)]
    assert found.at(1, 2).samples[1].median_ms == 2.0
    both = PairKey(modules=(key("tower"), key("another")), quotas=(1, 2))
    assert [beside.module for beside in kept.pair(both, ["c", "d"])] == ["d", "d"]
