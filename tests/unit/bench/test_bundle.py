"""The bundle of wheels: what installs from it, what is refused, and a machine that lacks what it brings."""

from __future__ import annotations

import zipfile
from pathlib import Path

from bench import bundle


def make_wheel(folder: Path, name: str) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"made_{name}.py", "here = True\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_a_bundle_installs_offline_into_a_folder_of_its_own(tmp_path: Path):
    make_wheel(tmp_path, "one")
    bundle.install(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "made_one.py").exists()
