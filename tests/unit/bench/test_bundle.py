"""The bundle of wheels: what installs from it, what is refused, and a machine that lacks what it brings."""

from __future__ import annotations

import zipfile
from pathlib import Path

from bench import bundle


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
