"""What was measured once is not measured again: caches, interrupted runs, changed modules, several processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.profile import Phase, Profile, Sample
from mosaic.profiler import ProfileCache, ProfileSettings, default_cache_folder, environment_of, profile_modules
from mosaic.profiler.records import MeasuredPoint, ModuleKey
from mosaic.profiler.structure import digest_of, inputs_of
from mosaic.profiler.surroundings import key_of


def unequal() -> TwoTowers:
    """Two towers that differ: equal ones share their measurements."""
    return TwoTowers(right=tower(8, 16, nn.Tanh()))


def profiled(
    model: nn.Module, cache: ProfileCache, batch: Any = None, settings: ProfileSettings = FAST, **options: Any
) -> tuple[Profile, int]:
    """Returns a profile, and how often a module was run for it."""
    runs: SimpleQueue[bool] = SimpleQueue()  # which is not put back, though a hook encloses it

    def count(_module: nn.Module, _args: object, result: torch.Tensor) -> None:
        if type(result) is torch.Tensor:  # counting operators calls modules on tensors without data
            runs.put(True)

    finding = find_modules(model, batch if batch is not None else pair_batch())
    hooks = [subject.module.register_forward_hook(count) for subject in finding.subjects]
    try:
        backend = HostBackend(num_slots=2)
        profile = profile_modules(
            model, finding.subjects, finding.graph, backend, cache=cache, settings=settings, **options
        )
    finally:
        for hook in hooks:
            hook.remove()
    return profile, runs.qsize()


def measurements(profile: Profile) -> object:
    return profile.samples, profile.pairs, profile.memory


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "cache")


def test_a_second_run_measures_nothing_and_says_the_same(cache: ProfileCache):
    settings = ProfileSettings(foreign_share=2.0, sample_seconds=0.05, min_repeats=2)
    torch.manual_seed(0)
    first, runs = profiled(unequal(), cache, settings=settings)
    assert runs > 0
    assert first.pairs
    torch.manual_seed(1)  # values of parameters do not matter
    again, runs = profiled(unequal(), cache, settings=settings)
    assert runs == 0
    assert measurements(again) == measurements(first)


def test_a_changed_module_is_measured_alone(cache: ProfileCache):
    first, _ = profiled(unequal(), cache)
    changed = TwoTowers(right=tower(8, 16, nn.Dropout(0.1)))
    again, runs = profiled(changed, cache)
    assert runs > 0
    assert [s for s in again.samples if s.module == "left"] == [s for s in first.samples if s.module == "left"]
    assert [s for s in again.samples if s.module == "right"] != [s for s in first.samples if s.module == "right"]


def test_measurements_are_found_under_another_name(cache: ProfileCache):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.audio = tower(), tower(8, 16, nn.Tanh())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.vision(x) + self.audio(y)

    profiled(unequal(), cache)
    found, runs = profiled(Other(), cache)
    assert runs == 0
    assert {sample.module for sample in found.samples} == {"vision", "audio"}
    assert {pair.module for pair in found.pairs} == {"vision", "audio"}


def test_equal_modules_are_measured_once(cache: ProfileCache):
    profile, _ = profiled(TwoTowers(), cache)
    left, right = ([s.times_ms for s in profile.samples if s.module == name] for name in ("left", "right"))
    assert left == right
    assert len(list(cache.folder.glob("module-*"))) == 1


def test_more_quotas_add_to_what_is_there(cache: ProfileCache):
    first, _ = profiled(unequal(), cache, quotas=[2])
    more, runs = profiled(unequal(), cache, quotas=[1, 2])
    assert runs > 0
    assert [s for s in more.samples if s.quota == 2] == list(first.samples)


def test_a_cache_can_be_filled_anew(cache: ProfileCache):
    first, _ = profiled(unequal(), cache)
    anew, runs = profiled(unequal(), ProfileCache(cache.folder, reuse=False))
    assert runs > 0
    assert measurements(anew) != measurements(first)
    again, runs = profiled(unequal(), cache)
    assert runs == 0
    assert measurements(again) == measurements(anew)


def test_other_inputs_and_too_few_repetitions_are_measured_again(cache: ProfileCache):
    profiled(unequal(), cache, quotas=[2])
    assert profiled(unequal(), cache, pair_batch(rows=6), quotas=[2])[1] == 0
    assert profiled(unequal(), cache, pair_batch(rows=4), quotas=[2])[1] > 0
    careful = ProfileSettings(foreign_share=2.0, sample_seconds=0.05, min_repeats=6)
    assert profiled(unequal(), cache, settings=careful, quotas=[2])[1] > 0


def test_what_was_measured_on_a_busier_machine_than_allowed_is_not_reused(cache: ProfileCache):
    profile, _ = profiled(unequal(), cache, quotas=[2])
    model = unequal()
    left = find_modules(model, pair_batch()).subjects[0]
    backend = HostBackend(num_slots=2)
    key = key_of(left, backend, environment_of(backend))
    assert cache.module(key, "left").points
    cache.add_module(key, [MeasuredPoint(samples=profile.samples[:2], foreign_cpu_share=3.0)], None)
    _, runs = profiled(model, cache, quotas=[2])
    assert runs > 0


CHOOSES = """
from torch import nn
from mosaic.profiler.structure import digest_of

class Chooses(nn.Linear):
    def forward(self, x, mode="sum"):
        return super().forward(x) if mode in {"sum", "mean", "max", "min"} else x

digest = digest_of(Chooses(3, 4))
"""
KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.profiler import ProfileCache, profile_modules

print(digest, flush=True)

def die(what, done, total):
    if done == 3:
        os.kill(os.getpid(), 9)

model = TwoTowers(right=tower(8, 16, nn.Tanh()))
finding = find_modules(model, pair_batch())
profile_modules(model, finding.subjects, finding.graph, HostBackend(num_slots=2), settings=FAST,
                cache=ProfileCache(Path(sys.argv[1])), progress=die)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProfileCache, str]:
    """The cache of a process that was killed while it profiled, and the digest that it had printed."""
    folder = tmp_path_factory.mktemp("killed")
    code = CHOOSES + KILLED.format(tests=str(Path(__file__).parents[2] / "cases" / "engine"))
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=False,
    )
    assert ended.returncode == -9, ended.stderr
    return ProfileCache(folder), ended.stdout.strip()


def test_a_digest_is_the_same_in_every_process(killed: tuple[ProfileCache, str]):
    here: dict[str, Any] = {"__name__": "__main__"}
    exec(CHOOSES, here)
    assert killed[1] == here["digest"]


def test_a_killed_run_goes_on_where_it_was(killed: tuple[ProfileCache, str]):
    cache, _ = killed
    ran: SimpleQueue[str] = SimpleQueue()  # which is not put back, though hooks enclose it
    model = unequal()
    finding = find_modules(model, pair_batch())
    backend = HostBackend(num_slots=2)
    now = environment_of(backend)
    kept = {s.name: cache.module(key_of(s, backend, now), s.name) for s in finding.subjects}
    num_points = {name: len(record.points) for name, record in kept.items()}
    assert num_points == {"left": 2, "right": 1}, [path.read_text() for path in cache.folder.glob("module-*")]
    assert all(s.infeasible is None for record in kept.values() for point in record.points for s in point.samples)
    for subject in finding.subjects:

        def note(_module: nn.Module, _args: object, result: torch.Tensor, name: str = subject.name) -> None:
            if type(result) is torch.Tensor:  # and not one without data, on which operators are counted
                ran.put(name)

        subject.module.register_forward_hook(note)
    settings = dataclasses.replace(FAST, pairs=False)
    profile = profile_modules(model, finding.subjects, finding.graph, backend, settings=settings, cache=cache)
    assert {ran.get() for _ in range(ran.qsize())} == {"right"}
    assert len(profile.samples) == 8


def test_a_broken_file_is_measured_again_and_said(cache: ProfileCache):
    profiled(unequal(), cache, quotas=[2])
    broken = sorted(cache.folder.glob("module-*"))[0]
    whole = broken.read_text()
    for content in ("", "{", '{"schema_version": 99}'):
        broken.write_text(content)
        with pytest.warns(UserWarning, match="measured again"):
            _, runs = profiled(unequal(), cache, quotas=[2])
        assert runs > 0
        assert len(broken.read_text()) > len(whole) / 2


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_profile(tmp_path: Path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.warns(UserWarning, match="measurements are not kept") as caught:
        profile, _ = profiled(unequal(), ProfileCache(blocker / "cache"))
    assert len(caught) == 1
    assert len(profile.samples) == 8


def test_writers_at_the_same_time_lose_nothing(cache: ProfileCache):
    key = ModuleKey(structure="s", inputs="i", device=HostBackend(num_slots=2).device, torch_version="2", driver="")

    def write(quota: int) -> None:
        sample = Sample(module="left", phase=Phase.FORWARD, quota=quota, times_ms=(1.0,))
        own = ProfileCache(cache.folder)  # a file descriptor each, as processes have
        own.add_module(key, [MeasuredPoint(samples=(sample,), foreign_cpu_share=None)], None)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(1, 33)))
    assert sorted(kept.point for kept in cache.module(key, "x").points) == [(1, quota) for quota in range(1, 33)]
    assert {path.suffix for path in cache.folder.iterdir() if path.name != ".lock"} == {".json"}


def test_the_default_folder_follows_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "mosaic" / "profiles"
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_cache_folder() == Path.home() / ".cache" / "mosaic" / "profiles"


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


def test_a_digest_sees_plain_settings_base_classes_and_wrapped_methods():
    def make(heads: int, factor: int, *, wraps: bool) -> nn.Module:
        class Base(nn.Module):
            def scale(self, x: torch.Tensor) -> torch.Tensor:
                return x * (2 if factor == 2 else 3)

        class Doubles(nn.Module):
            def scale(self, x: torch.Tensor) -> torch.Tensor:
                return x + x

        class Part(Base if factor == 2 else Doubles):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.heads = heads

            if wraps:

                @torch.no_grad()
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.scale(x)
            else:

                @torch.no_grad()
                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.scale(x).relu()

        return Part()

    digests = [digest_of(make(*how, wraps=w)) for how, w in (((1, 2), True), ((2, 2), True), ((1, 3), True))]
    digests.append(digest_of(make(1, 2, wraps=False)))
    assert len(set(digests)) == 4
    assert digest_of(make(1, 2, wraps=True)) == digests[0]


def test_inputs_are_told_apart_by_shape_dtype_plain_values_and_autocast():
    def key(*batch: Any, cast: bool = False) -> str:
        class Takes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 4)

            def forward(self, x: torch.Tensor, flag: object = None) -> torch.Tensor:
                return self.layer(x)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.only = Takes()

            def forward(self, x: torch.Tensor, flag: object = None) -> torch.Tensor:
                return self.only(x, flag)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            (subject,) = find_modules(Model(), batch, include=["only"]).subjects
        return inputs_of(subject)

    x = torch.randn(6, 8)
    keys = [key(x), key(x, True), key(torch.randn(3, 8)), key(x.clone().requires_grad_()), key(x, cast=True)]
    assert len(set(keys)) == len(keys)
    assert key(torch.zeros(6, 8)) == keys[0]
