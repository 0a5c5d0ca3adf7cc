"""The bundle of wheels: what installs from it, what is refused, and a machine that lacks what it brings."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench import bundle, tables

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "pydantic_core", "annotated_types", "tyro", "ortools"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
"""As a sitecustomize: a machine that lacks what the bundle brings."""


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> Path:
    """Makes a wheel with one module, ``made_NAME``."""
    made = folder / f"{name}-1.0-{tag}.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(f"made_{name}.py", "here = True\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")
    return made


def test_a_bundle_installs_offline_into_a_folder_of_its_own(tmp_path: Path):
    wheel(tmp_path, "one")
    bundle.install(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "made_one.py").exists()


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a process on a machine without pydantic, tyro and ortools."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    path = os.pathsep.join([str(tmp_path), str(tables.TOP)])
    return {**os.environ, "PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}


def test_without_the_bundle_what_is_missing_is_named_and_the_ladder_stands(bare: dict[str, str], tmp_path: Path):
    names = ("first/events", "first/towers", "ceilings")
    only = [word for name in names for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path / "out"), "--dry-run", "--no-build", *only],
        cwd=tables.TOP, env=bare, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("pydantic", "tyro", "ortools"):
        assert f"\n  {name} " in done.stdout
    assert "equal within 0" in done.stdout
    assert list((tmp_path / "out").glob("*.json"))


def test_no_gpu_test_needs_them_to_be_found(bare: dict[str, str]):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "tests/contract", "-m", "gpu", "--collect-only", "-q"],
        cwd=tables.TOP, env=bare, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
