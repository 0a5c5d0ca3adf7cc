"""Nothing is measured twice: caches, interrupted runs, changed modules, several processes."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from foreign_load import others_use
from planning_cases import device_of, pair
from torch import nn

import mosaic
from mosaic.artifact import load
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.profile import Phase, Profile, Sample
from mosaic.profiler import (
    ProfileCache,
    ProfileSettings,
    profile_modules,
)
from mosaic.profiler.cache import ModuleKey, ModuleRecord, digest_of, inputs_of


def unequal() -> TwoTowers:
    """Two towers that differ: equal ones share their measurements."""
    return TwoTowers(right=tower(8, 16, nn.Tanh()))


def profiled(
    model: nn.Module, cache: ProfileCache, batch: Any = None, settings: ProfileSettings = FAST, **options: Any
) -> tuple[Profile, list[str]]:
    """Returns a profile, and the modules that were run for it."""
    runs: SimpleQueue[str] = SimpleQueue()  # which is not restored, though a hook encloses it
    finding = find_modules(model, batch if batch is not None else pair_batch())
    hooks = [
        subject.module.register_forward_hook(lambda *_, name=subject.name: runs.put(name))
        for subject in finding.subjects
    ]
    try:
        backend = HostBackend(num_slots=2)
        profile = profile_modules(
            model, finding.subjects, finding.graph, backend, cache=cache, settings=settings, **options
        )
    finally:
        for hook in hooks:
            hook.remove()
    return profile, [runs.get() for _ in range(runs.qsize())]


def measurements(profile: Profile) -> object:
    return profile.samples, profile.pairs, profile.memory


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "cache")


def test_a_run_that_is_ended_goes_on_where_it_was(cache: ProfileCache):
    def end(what: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(unequal(), cache, progress=end)
    profile, runs = profiled(unequal(), cache, settings=dataclasses.replace(FAST, pairs=False))
    assert set(runs) == {"right"}
    assert len(profile.samples) == 8


def test_times_that_other_processes_disturbed_are_measured_again(cache: ProfileCache, monkeypatch: pytest.MonkeyPatch):
    busy = dataclasses.replace(FAST, pairs=False, foreign_share=0.1, retry_seconds=0.0)
    others_use(monkeypatch, 0.75)
    profiled(unequal(), cache, settings=busy)
    others_use(monkeypatch, 0.0)
    for measured in ({"left", "right"}, set()):
        _, runs = profiled(unequal(), cache, settings=busy)
        assert set(runs) == measured


def test_writers_at_the_same_time_leave_a_readable_file(cache: ProfileCache):
    def write(quota: int) -> None:
        point = Sample(module="left", phase=Phase.FORWARD, quota=quota, times_ms=(1.0,))
        own = ProfileCache(cache.folder)  # each has read what the others had written by then, as processes have
        own.add(ModuleRecord(key=key("s"), samples=(point,)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 33)))
    (file,) = cache.folder.iterdir()
    quotas = {sample.quota for sample in load(ModuleRecord, file).samples}
    assert quotas
    assert quotas <= set(range(1, 33))
    write(33)
    assert {sample.quota for sample in cache.record(key("s")).samples} == quotas | {33}


def key(structure: str) -> ModuleKey:
    return ModuleKey(structure=structure, inputs="rows", device=device_of(2), torch_version="2", driver="")


def test_pairs_are_found_under_the_present_names_and_not_of_one_side_alone():
    cache, keys = ProfileCache(), {"a": key("tower"), "b": key("another")}
    sides = [
        [pair(*names, 1.5, phase=phase, quota=quota, beside_quota=3 - quota) for phase in Phase]
        for names, quota in ((("b", "a"), 2), (("a", "b"), 1))
    ]
    cache.add_pairs(keys, sides[0])
    assert cache.pair(keys, {"a": 1, "b": 2}) == ()
    cache.add_pairs(keys, sides[1])
    renamed = cache.pair({"c": keys["a"], "d": keys["b"]}, {"c": 1, "d": 2})
    assert [(beside.module, beside.beside) for beside in renamed] == [("c", "d")] * 2 + [("d", "c")] * 2


def described(model: nn.Module | None = None, **options: Any) -> tuple[Profile, str]:
    backend = HostBackend(num_slots=1)  # no gain to be had, so nothing is placed
    handle = mosaic.colocate(
        model or TwoTowers(), sample=pair_batch(), backend=backend, options=mosaic.Options(profiling=FAST, **options)
    )
    assert handle.profile is not None
    return handle.profile, handle.describe()


def test_the_second_call_measures_nothing_and_says_from_when_its_profile_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, said = described()
    assert "planned from 4 samples; the latest is of" in said
    assert any((tmp_path / "mosaic" / "profiles").glob("*.json"))
    again, said = described()
    assert again.samples == first.samples
    date = first.samples[0].measured[:16].replace("T", " ")
    assert f"4 samples, 4 of them reused from earlier profiles; the latest is of {date}" in said
    changed, said = described(TwoTowers(right=tower(8, 16, nn.ReLU())))
    assert {sample.module for sample in changed.samples if sample in first.samples} == {"left"}
    assert "4 samples, 2 of them reused" in said


# Keys.


def test_a_digest_sees_structure_mode_and_code_and_not_values():
    torch.manual_seed(0)
    first = digest_of(tower())
    torch.manual_seed(1)
    assert digest_of(tower()) == first
    assert digest_of(tower().eval()) != first
    assert digest_of(tower().half()) != first
    assert digest_of(tower().requires_grad_(False)) != first

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    before = digest_of(Scaled(4, 4))

    class Scaled(nn.Linear):  # type: ignore[no-redef]  # as after an edit
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x).relu()

    assert digest_of(Scaled(4, 4)) != before


def test_inputs_are_told_apart_by_shape_dtype_plain_values_and_autocast():
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, flag: object = None) -> torch.Tensor:
            return self.layer(x)

    def digest(*batch: Any, cast: bool = False) -> str:
        model = nn.Module()
        model.only = Takes()
        model.forward = lambda *args: model.only(*args)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            (subject,) = find_modules(model, batch, include=["only"]).subjects
        return inputs_of(subject)

    x = torch.randn(6, 8)
    others = (digest(x, True), digest(torch.randn(3, 8)), digest(x.clone().requires_grad_()), digest(x, cast=True))
    assert len({digest(x), *others}) == 5
    assert digest(torch.zeros(6, 8)) == digest(x)
