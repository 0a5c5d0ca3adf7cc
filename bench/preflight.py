"""What ``python -m bench.gpu`` needs on a bare machine, looked for before anything else; standard library only."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import run_logged

TOP = Path(__file__).resolve().parent.parent
BUILT = TOP / "build" / "gpu"
"""Where the package is built: nothing is installed into the machine's Python."""


@dataclass(frozen=True)
class Package:
    """A distribution that may be missing."""

    name: str
    """As pip knows it."""
    imported: str
    """As Python imports it."""
    without: str
    """What cannot be done without it; empty where nothing can."""


PACKAGES = (
    Package("torch", "torch", ""),
    Package("numpy", "numpy", ""),
    Package("pydantic", "pydantic", ""),
    Package("rich", "rich", ""),
    Package("setuptools", "setuptools", ""),
    Package("pybind11", "pybind11", ""),
    Package("pytest", "pytest", "the gpu tests cannot run"),
    Package("pytest-timeout", "pytest_timeout", "the gpu tests cannot run"),
    Package("hypothesis", "hypothesis", "tests of properties cannot run"),
    Package("ortools", "ortools", "plans of more than a few modules cannot be solved: their rows say so"),
    Package("tyro", "tyro", "the mosaic command does not start; nothing here needs it"),
    Package("safetensors", "safetensors", "nothing here needs it"),
    Package("nvidia-ml-py", "pynvml", "the driver's version and GPM cannot be read"),
    Package("cuda-bindings", "cuda.bindings", "partitions cannot be made by a chain of splits, for comparison"),
    Package("matplotlib", "matplotlib", "pictures cannot be drawn"),
    Package("transformers", "transformers", "tests with models of transformers cannot run"),
)
"""In the order in which they are named."""


def missing_packages() -> tuple[Package, ...]:
    """Returns what cannot be imported; imports nothing but the parents of submodules."""
    return tuple(package for package in PACKAGES if not _is_there(package.imported))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def how_to_bring(missing: Sequence[Package]) -> str:
    """Says in plain lines what is missing, what is lost without it, and how to bring it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(package.name for package in missing)
    lines = ["These Python packages are missing:"]
    lines += [f"  {p.name:16} {p.without or 'NEEDED: nothing can run without it'}" for p in missing]
    return "\n".join(
        [
            *lines,
            "With a network:    python -m pip install " + names,
            "Without a network: on a machine that has one,",
            "                   python -m pip download --only-binary=:all: "
            f"--python-version {python} -d wheels {names}",
            "                   then bring the folder and run",
            "                   python -m pip install --no-index --find-links wheels " + names,
        ]
    )


def missing_tools(*, to_build: bool) -> tuple[str, ...]:
    """Returns what is missing besides packages, each with what to do."""
    found = []
    if to_build and shutil.which(os.environ.get("CXX", "g++")) is None:
        found.append("g++ is missing (Debian: apt-get install g++)")
    if to_build and not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        found.append("Python's headers are missing (Debian: apt-get install python3-dev)")
    if to_build and not has_cuda_header():
        found.append(
            "no cuda.h is found: it comes with torch's own CUDA packages (nvidia/cu13/include), with "
            "`pip install 'nvidia-cuda-runtime>=13.0'`, or with a toolkit that CUDA_HOME names"
        )
    return tuple(found)


def has_cuda_header() -> bool:
    """Tells whether a ``cuda.h`` can be found where ``setup.py`` looks; it checks the version."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if any(next(folder.glob("*/include/cuda.h"), None) for folder in folders):
        return True
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    homes += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    return any((Path(home) / "include" / "cuda.h").is_file() for home in homes)


def why_no_gpu(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str | None:
    """Returns why no GPU can be used here, or None where there is one; makes no context."""
    try:
        driver = load("libcuda.so.1")
    except OSError as error:
        return f"there is no CUDA driver ({error})"
    if not hasattr(driver, "cuInit"):
        return "libcuda.so.1 is not NVIDIA's driver (it has no cuInit)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the CUDA driver does not start (cuInit returned {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return f"the CUDA driver offers {count.value} GPUs (cuDeviceGetCount returned {status})"
    return None


BUILD = """
import runpy, sys
from pybind11.setup_helpers import ParallelCompile
ParallelCompile("MOSAIC_BUILD_JOBS", default=0).install()  # as many compilers as there are cores
runpy.run_path("setup.py", run_name="__main__")
"""


def build(log: Path, *, seconds: float) -> None:
    """Builds the whole package, extensions included, below ``BUILT``, with its output in ``log``.

    Raises:
        subprocess.SubprocessError: It failed, or took longer than ``seconds``.
    """
    for stale in (BUILT / "lib").rglob("*.py"):  # of a file that is gone by now, a copy may be left
        stale.unlink()
    command = [sys.executable, "-c", BUILD, "--quiet", "build"]
    command += ["--build-lib", str(BUILT / "lib"), "--build-temp", str(BUILT / "temp")]
    run_logged(command, log, folder=TOP, seconds=seconds, environment=dict(os.environ))


def environment_of_build() -> dict[str, str]:
    """Returns an environment in which Python takes Mosaic from the build and everything else from this tree."""
    paths = [str(BUILT / "lib"), str(TOP), str(TOP / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def versions() -> dict[str, str]:
    """Returns the versions of the packages that are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package.name] = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
