"""``mosaic.colocate`` keeps what it measured in the user's own cache folder, finds it again, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import FAST, TwoTowers, pair_batch, tower
from torch import nn

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.cache_folder import folder_use
from mosaic.cli.doctor.machine import collect_report, render
from mosaic.profile import Profile
from mosaic.profiler import ProfileCache, open_cache
from mosaic.profiler.surroundings import environment_of, key_of


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mosaic" / "profiles"


def described(model: nn.Module | None = None, **options: Any) -> tuple[Profile, str]:
    backend = HostBackend(num_slots=1)  # no gain to be had, so nothing is placed
    handle = mosaic.colocate(
        model or TwoTowers(), sample=pair_batch(), backend=backend, options=mosaic.Options(profiling=FAST, **options)
    )
    assert handle.profile is not None
    return handle.profile, handle.describe()


def test_the_second_call_measures_nothing_and_says_from_when_its_profile_is(users_folder: Path):
    first, said = described()
    assert not first.reused
    assert "4 samples measured" in said
    assert folder_use(users_folder).num_files > 0
    again, said = described()
    assert again.samples == first.samples
    assert again.reused == again.samples
    date = first.samples[0].measured[:16].replace("T", " ")
    assert f"planned from a profile of {date}" in said
    assert "nothing was measured again" in said


def test_only_what_changed_is_measured_and_said(users_folder: Path):
    described(TwoTowers(right=tower(8, 16, nn.Tanh())))
    profile, said = described(TwoTowers(right=tower(8, 16, nn.ReLU())))
    assert {sample.module for sample in profile.reused} == {"left"}
    assert "4 samples, of which 2 reused from" in said
    assert "and 2 new" in said


def test_no_cache_leaves_nothing_and_finds_nothing(users_folder: Path):
    described()
    before = {path: path.read_bytes() for path in users_folder.iterdir()}
    profile, _ = described(TwoTowers(), cache=None)
    assert not profile.reused
    assert {path: path.read_bytes() for path in users_folder.iterdir()} == before


def test_a_folder_or_a_cache_may_be_given_instead(users_folder: Path, tmp_path: Path):
    first, _ = described(cache=tmp_path / "own")
    again, _ = described(cache=ProfileCache(tmp_path / "own"))
    assert again.reused == first.samples
    assert not users_folder.exists()


def test_a_user_without_a_home_folder_is_warned_and_served(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(UserWarning, match="measurements are not kept.*XDG_CACHE_HOME"):
        assert open_cache("user") is None
    report = collect_report({"OMP_WAIT_POLICY": "PASSIVE"})
    assert report.cache is None
    assert any("not kept" in finding.what for finding in report.findings)


def test_other_threads_are_other_measurements(monkeypatch: pytest.MonkeyPatch):
    from mosaic.engine import find_modules

    backend = HostBackend(num_slots=2)
    subject = find_modules(TwoTowers(), pair_batch()).subjects[0]
    keys = set()
    for waiting in ("PASSIVE", "ACTIVE"):
        monkeypatch.setenv("OMP_WAIT_POLICY", waiting)
        keys.add(key_of(subject, backend, environment_of(backend)))
    monkeypatch.setattr("mosaic.profiler.surroundings.available_cores", lambda: (0, 1, 2, 3, 4))
    keys.add(key_of(subject, backend, environment_of(backend)))
    assert len(keys) == 3


def test_other_sm_settings_are_other_measurements(monkeypatch: pytest.MonkeyPatch):
    from mosaic.engine import find_modules

    subject, backend = find_modules(TwoTowers(), pair_batch()).subjects[0], HostBackend(num_slots=2)
    plain = key_of(subject, backend, environment_of(backend))
    monkeypatch.setattr(HostBackend, "sm_settings", "SM targets")
    assert key_of(subject, backend, environment_of(backend)) != plain


def test_memory_that_a_kernel_brings_up_late_is_no_other_device(monkeypatch: pytest.MonkeyPatch):
    from mosaic.engine import find_modules

    subject = find_modules(TwoTowers(), pair_batch()).subjects[0]
    keys = set()
    for total in (8 << 30, 24 << 30):
        monkeypatch.setattr("mosaic.backends.host.backend._memory_bytes", lambda total=total: total)
        backend = HostBackend(num_slots=2)
        assert backend.device.memory_bytes == total
        keys.add(key_of(subject, backend, environment_of(backend)))
    assert len(keys) == 1


def test_the_doctor_says_where_the_cache_is_and_how_large(users_folder: Path, tmp_path: Path):
    import io

    from rich.console import Console

    environ = {"OMP_WAIT_POLICY": "PASSIVE", "XDG_CACHE_HOME": str(tmp_path)}

    def printed() -> str:
        page = io.StringIO()
        render(collect_report(environ), Console(file=page, width=300))
        return page.getvalue()

    assert f"{users_folder} (empty)" in printed()
    described()
    use = folder_use(users_folder)
    report = collect_report(environ)
    assert report.cache is not None
    assert (report.cache.num_files, report.cache.num_bytes) == (use.num_files, use.num_bytes)
    assert f"{users_folder} (1 file, " in printed()  # equal towers share theirs
