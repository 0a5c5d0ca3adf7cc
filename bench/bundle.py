"""Wheels for a GPU machine without a network: packed where there is one, installed offline by ``python -m bench.gpu``.

``python -m bench.bundle [--python 3.12] [NAME ...]`` (``make gpu-bundle``); standard library and pip only.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
WHEELS = TOP / "build" / "gpu-wheels"
"""The wheels that travel with the tree."""
SITE = TOP / "build" / "gpu-site"
"""The folder of the installed bundle, before the machine's packages."""
WANTED = ("pydantic>=2.9", "tyro>=0.9", "ortools>=9.12", "pybind11>=3.0", "setuptools>=77,<82")
"""Packages that such a machine lacks or has too old; their dependencies come along. No CUDA build of torch has a newer
setuptools, which is why its pin in ``constraints.txt`` does not hold here."""
PRESENT = ("numpy",)
"""Dependencies that every machine with torch has, too large to carry twice."""
MAX_BYTES = 50 << 20
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(34, 4, -1)), "manylinux2014_x86_64")
"""Named one by one, since pip matches each to the letter."""


class BundleError(Exception):
    """The bundle cannot be packed or installed; the message says what to do."""


def pack(python: str, more: Sequence[str] = (), folder: Path = WHEELS) -> list[Path]:
    """Downloads the wheels for a version of Python into ``folder``, whole or not at all.

    Raises:
        BundleError: pip failed, or the wheels are too large together.
    """
    with tempfile.TemporaryDirectory(prefix="mosaic-wheels-") as aside:
        command = ["download", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        pins = (TOP / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        constraints = Path(aside) / "constraints.txt"
        constraints.write_text("".join(pin for pin in pins if not pin.startswith("setuptools==")), encoding="utf-8")
        _pip(*command, "--constraint", str(constraints), "--dest", aside, *WANTED, *more)
        wheels = [wheel for wheel in sorted(Path(aside).glob("*.whl")) if name_of(wheel) not in PRESENT]
        size = sum(wheel.stat().st_size for wheel in wheels)
        if size > MAX_BYTES:
            raise BundleError(f"the wheels take {size >> 20} MiB, over {MAX_BYTES >> 20}: name the largest in PRESENT")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return [Path(shutil.copy(wheel, folder)) for wheel in wheels]


def install(wheels: Path = WHEELS, site: Path = SITE) -> None:
    """Installs a bundle into a folder of its own, offline.

    Raises:
        BundleError: There is none, or pip refused a wheel, such as one for another version of Python.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"where there is a network, pack it for this Python: make gpu-bundle GPU_PYTHON={python}"
    archives = sorted(wheels.glob("*.whl"))
    if not archives:
        raise BundleError(f"there is no bundle in {wheels}; {remedy}")
    shutil.rmtree(site, ignore_errors=True)
    command = ["install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    try:
        _pip(*command, *map(str, archives))
    except BundleError as error:
        raise BundleError(f"the bundle does not install here: {error}; {remedy}") from error


def name_of(wheel: Path) -> str:
    """Returns the distribution's name as pip normalises it."""
    return wheel.name.partition("-")[0].replace("_", "-").lower()


def _pip(command: str, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise BundleError(f"pip {command} failed: {' '.join(lines[-2:]) or 'it said nothing'}")


def main() -> int:
    """Packs the bundle and says what is in it."""
    parser = argparse.ArgumentParser(prog="python -m bench.bundle", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    parser.add_argument("more", nargs="*", metavar="NAME", help="further packages that the machine lacks")
    asked = parser.parse_args()
    try:
        wheels = pack(asked.python, asked.more)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in wheels)
    print("\n".join(wheel.name for wheel in wheels))
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB in {WHEELS.relative_to(TOP)}; bring them with the tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
