"""Runs the GPU tests by file, in the process of a measurement, which has loaded torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.bundle import TOP
from bench.gpu.bench import Bench
from bench.record import Figure, one_line
from mosaic.microbench import Budget


def run_tests(bench: Bench, *, file: str) -> Iterator[Figure]:
    """Runs and counts the GPU tests of a file, at most 60 s each; skips tests beyond the time limit.

    Raises:
        AssertionError: A test failed; has the names and first lines.
    """
    os.chdir(TOP)
    if bench.on_gpu:
        os.environ["MOSAIC_REQUIRE_GPU"] = "1"
    seen = _Seen(bench.budget)
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=50"]
    code = pytest.main([file, *options, "--timeout", "60", "--timeout-method", "thread"], plugins=[seen])
    for outcome, count in seen.counts.items():
        yield Figure(name=outcome, source="measured", value=float(count), labels={"file": file})
    bench.verdict = ", ".join(f"{count} {outcome}" for outcome, count in seen.counts.items())
    if code != 0:
        raise AssertionError("; ".join(seen.failures) or f"pytest ended with {code!r}")


class _Seen:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self._budget.allows(item.name):
            pytest.skip("no time was left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.failed:
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        name = report.nodeid.rpartition("::")[2]
        self.failures.append(f"{name}: {one_line(crash.message if crash else report.longrepr, 200)}")
