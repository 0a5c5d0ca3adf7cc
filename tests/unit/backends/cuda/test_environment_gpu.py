"""Tests marked ``gpu``: skipped without a GPU, and failed where one is required."""

from __future__ import annotations

from types import ModuleType

import pytest


class Marked:
    """A test that is marked, as far as the hook looks at it."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks

    def get_closest_marker(self, name: str) -> object:
        return name if name in self._marks else None


@pytest.fixture
def hooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tests' own hooks, on a machine without a GPU."""
    found = next(one for one in request.config.pluginmanager.get_plugins() if hasattr(one, "why_no_gpu"))
    monkeypatch.setattr(found, "why_no_gpu", lambda: "no driver")
    monkeypatch.delenv("MOSAIC_REQUIRE_GPU", raising=False)
    return found


@pytest.mark.parametrize("required", [None, "0"])
def test_gpu_tests_are_skipped_without_a_gpu_and_say_why(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, required: str | None
):
    if required is not None:
        monkeypatch.setenv("MOSAIC_REQUIRE_GPU", required)
    with pytest.raises(pytest.skip.Exception, match="no GPU to use: no driver"):
        hooks.pytest_runtest_setup(Marked("gpu"))


def test_gpu_tests_fail_without_a_gpu_where_one_is_required(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOSAIC_REQUIRE_GPU", "1")
    with pytest.raises(pytest.fail.Exception, match="MOSAIC_REQUIRE_GPU=1 and there is no GPU to use: no driver"):
        hooks.pytest_runtest_setup(Marked("gpu"))


def test_other_tests_run_and_gpu_tests_run_where_there_is_one(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch):
    hooks.pytest_runtest_setup(Marked())
    monkeypatch.setattr(hooks, "why_no_gpu", lambda: "")
    hooks.pytest_runtest_setup(Marked("gpu"))
