"""Tests marked ``gpu``: skipped without a GPU, and failed where one is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def run_gpu_test(*, required: str | None) -> subprocess.CompletedProcess[str]:
    """Runs one test of the contract on a machine that offers no GPU."""
    environ = {key: value for key, value in os.environ.items() if key != "MOSAIC_REQUIRE_GPU"}
    environ |= {"CUDA_VISIBLE_DEVICES": ""} | ({} if required is None else {"MOSAIC_REQUIRE_GPU": required})
    one = "tests/contract/test_backend_contract.py::test_the_protocols_are_met[cuda]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", one]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("required", [None, "0"])
def test_gpu_tests_are_skipped_without_a_gpu_and_say_why(required: str | None):
    done = run_gpu_test(required=required)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "no GPU to use: " in done.stdout


def test_gpu_tests_fail_without_a_gpu_where_one_is_required():
    done = run_gpu_test(required="1")
    assert done.returncode == 1, done.stdout
    assert "MOSAIC_REQUIRE_GPU=1 and there is no GPU to use: " in done.stdout
    assert "1 skipped" not in done.stdout
