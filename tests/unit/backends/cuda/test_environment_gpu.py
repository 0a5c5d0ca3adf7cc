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


@pytest.mark.parametrize(
    ("required", "outcome", "says"),
    [
        (None, pytest.skip.Exception, "no GPU to use: no driver"),
        ("0", pytest.skip.Exception, "no GPU to use: no driver"),
        ("1", pytest.fail.Exception, "MOSAIC_REQUIRE_GPU=1 and there is no GPU to use: no driver"),
    ],
)
def test_gpu_tests_without_a_gpu_are_skipped_or_fail_where_one_is_required(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, required: str | None, outcome: type[BaseException], says: str
):
    if required is not None:
        monkeypatch.setenv("MOSAIC_REQUIRE_GPU", required)
    with pytest.raises(outcome, match=says):
        hooks.pytest_runtest_setup(Marked("gpu"))


def test_other_tests_run_and_gpu_tests_run_where_there_is_one(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch):
    hooks.pytest_runtest_setup(Marked())
    monkeypatch.setattr(hooks, "why_no_gpu", lambda: "")
    hooks.pytest_runtest_setup(Marked("gpu"))
