"""Packs wheels for a GPU machine without a network; ``python -m bench.gpu`` installs them offline.

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
"""Folder of the wheels."""
SITE = TOP / "build" / "gpu-site"
"""The folder of the installed bundle, before the machine's packages."""
WANTED = ("pydantic>=2.9", "tyro>=0.9", "ortools>=9.12", "pybind11>=3.0", "setuptools>=77,<82")
"""Packages that such a machine may lack, bundled with their dependencies. CUDA builds of torch need an older setuptools
than the pin in ``constraints.txt``."""
PRESENT = ("numpy",)
"""Dependencies that every machine with torch has."""
MAX_BYTES = 50 << 20
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(34, 4, -1)), "manylinux2014_x86_64")
"""Listed one by one, because pip matches exact names."""


class BundleError(Exception):
    """The bundle cannot be packed or installed; has the remedy."""


def pack(python: str, more: Sequence[str] = (), folder: Path = WHEELS) -> list[Path]:
    """Downloads the wheels for a version of Python into ``folder``, atomically.

    Raises:
        BundleError: pip failed, or the wheels are too large.
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
    """Installs a bundle offline into a separate folder.

    Raises:
        BundleError: The bundle is missing, or pip refused a wheel, for example for another version of Python.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"where there is a network, pack it for this Python: make gpu-bundle GPU_PYTHON={python}"
    archives = sorted(wheels.glob("*.whl"))
    if not archives:
        raise BundleError(f"{wheels} has no bundle; {remedy}")
    shutil.rmtree(site, ignore_errors=True)
    command = ["install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    try:
        _pip(*command, *map(str, archives))
    except BundleError as error:
        raise BundleError(f"the bundle cannot be installed: {error}; {remedy}") from error


def name_of(wheel: Path) -> str:
    """Returns the distribution's name as pip normalises it."""
    return wheel.name.partition("-")[0].replace("_", "-").lower()


def _pip(command: str, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise BundleError(f"pip {command} failed: {' '.join(lines[-2:]) or 'no output'}")


def main() -> int:
    """Packs the bundle and prints its content."""
    parser = argparse.ArgumentParser(prog="python -m bench.bundle", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    parser.add_argument("more", nargs="*", metavar="NAME", help="additional packages")
    asked = parser.parse_args()
    try:
        wheels = pack(asked.python, asked.more)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in wheels)
    print("\n".join(wheel.name for wheel in wheels))
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB in {WHEELS.relative_to(TOP)}; copy them with the tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
