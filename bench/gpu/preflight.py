"""Checks the requirements of ``python -m bench.gpu``; needs only the standard library."""

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

from bench import bundle

TOP = bundle.TOP
BUILT = TOP / "build" / "gpu"
"""Folder of the built package, outside the machine's Python."""


@dataclass(frozen=True)
class Package:
    name: str
    """Name in pip."""
    imported: str
    """Name of its module."""
    without: str
    """The consequence of its absence; empty if it is required."""
    at_least: tuple[int, ...] = ()


PACKAGES = (
    Package("torch", "torch", "", (2, 11)),
    Package("numpy", "numpy", ""),
    Package("rich", "rich", ""),
    Package("setuptools", "setuptools", "the package cannot be built", (77,)),
    Package("pybind11", "pybind11", "the package cannot be built", (3,)),
    Package("pydantic", "pydantic", "no file can be read back: gpu tests that read one fail"),
    Package("ortools", "ortools", "plans of more than a few modules cannot be solved: their rows say so"),
    Package("tyro", "tyro", "the mosaic command does not start; nothing here needs it"),
    Package("pytest", "pytest", "the gpu tests cannot run"),
    Package("pytest-timeout", "pytest_timeout", "the gpu tests cannot run"),
    Package("hypothesis", "hypothesis", "tests of properties cannot run"),
    Package("safetensors", "safetensors", "nothing here needs it"),
    Package("nvidia-ml-py", "pynvml", "the driver's version, clocks and GPM cannot be read"),
    Package("cuda-bindings", "cuda.bindings", "SM ids cannot be read: the probe cannot be compiled"),
    Package("matplotlib", "matplotlib", "nothing here needs it"),
    Package("transformers", "transformers", "tests with models of transformers cannot run"),
)
"""Packages in order."""


def missing_packages() -> tuple[Package, ...]:
    """Returns packages that are missing or too old; imports only parents of submodules."""
    return tuple(package for package in PACKAGES if not _is_there(package))


def bring_bundle() -> str:
    """Installs the bundle if something is missing; returns a message.

    The bundle precedes the machine's packages, here and in child processes.
    """
    if bundle.SITE.is_dir():  # installed by an earlier run
        _use_site()
    carried = {bundle.name_of(wheel) for wheel in bundle.WHEELS.glob("*.whl")}
    bundled = [package.name for package in missing_packages() if package.name in carried]
    if not bundled:
        return ""
    try:
        bundle.install()
    except bundle.BundleError as error:
        return str(error)
    _use_site()
    return f"installed from the bundle: {', '.join(bundled)} and their dependencies"


def _use_site() -> None:
    site = str(bundle.SITE)
    if site not in sys.path:
        sys.path.insert(0, site)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    importlib.invalidate_caches()


def _is_there(package: Package) -> bool:
    try:
        if importlib.util.find_spec(package.imported) is None:
            return False
        result = importlib.metadata.version(package.name) if package.at_least else ""
    except (ImportError, ValueError):
        return False
    numbers = tuple(int(part) for part in result.split("+")[0].split(".") if part.isdigit())
    return not package.at_least or numbers >= package.at_least


def how_to_bring(missing: Sequence[Package]) -> str:
    """Returns lines with missing packages, the consequences, and remedies."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = ["These Python packages are missing or too old:"]
    lines += [f"  {p.name:16} {p.without or 'REQUIRED'}" for p in missing]
    bundled = {requirement.partition(">=")[0] for requirement in bundle.WANTED}
    more = " ".join(package.name for package in missing if package.name not in bundled)
    lines += [
        f"With a network:    python -m pip install {' '.join(package.name for package in missing)}",
        "Without a network, on another machine run",
        f"                   make gpu-bundle GPU_PYTHON={python}" + (f" GPU_MORE='{more}'" if more else ""),
        f"                   then copy this folder with {bundle.WHEELS.relative_to(TOP)} and run this again",
    ]
    return "\n".join(lines)


def missing_tools(*, to_build: bool) -> tuple[str, ...]:
    """Returns missing tools, each with a remedy."""
    result = []
    if to_build and shutil.which(os.environ.get("CXX", "g++")) is None:
        result.append("g++ is missing (Debian: apt-get install g++)")
    if to_build and not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        result.append("Python's headers are missing (Debian: apt-get install python3-dev)")
    if to_build and not has_cuda_header():
        result.append(
            "no cuda.h is found: it comes with torch's own CUDA packages (nvidia/cu13/include), with "
            "`pip install 'nvidia-cuda-runtime>=13.0'`, or with a toolkit that CUDA_HOME names"
        )
    return tuple(result)


def has_cuda_header() -> bool:
    """Returns True if ``setup.py`` finds a ``cuda.h``; it checks the version."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if any(next(folder.glob("*/include/cuda.h"), None) for folder in folders):
        return True
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    homes += [str(Path(nvcc).resolve().parent.parent)] if nvcc else []
    homes += map(str, Path("/usr/local").glob("cuda*"))
    return any((Path(home) / "include" / "cuda.h").is_file() for home in homes)


def why_no_gpu(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> str | None:
    """Returns the reason why no GPU can be used, or None; creates no context."""
    try:
        driver = load("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver is missing ({error})"
    if not hasattr(driver, "cuInit"):
        return "libcuda.so.1 is not NVIDIA's driver (it has no cuInit)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the CUDA driver fails (cuInit returned {status})"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return f"the CUDA driver has {count.value} GPUs (cuDeviceGetCount returned {status})"
    return None


BUILD = """
import runpy, sys
from pybind11.setup_helpers import ParallelCompile
ParallelCompile("MOSAIC_BUILD_JOBS", default=0).install()  # as many compilers as there are cores
runpy.run_path("setup.py", run_name="__main__")
"""


def build(log: Path, *, seconds: float) -> None:
    """Builds the package with its extensions in ``BUILT``, with output in ``log``.

    Raises:
        subprocess.SubprocessError: The build failed, or took longer than ``seconds``.
    """
    from bench.processes import run_logged  # may need packages of the bundle

    for stale in (BUILT / "lib").rglob("*.py"):  # removes copies of deleted files
        stale.unlink()
    command = [sys.executable, "-c", BUILD, "--quiet", "build"]
    command += ["--build-lib", str(BUILT / "lib"), "--build-temp", str(BUILT / "temp")]
    run_logged(command, log, folder=TOP, seconds=seconds, environment=dict(os.environ))


def environment_of_build() -> dict[str, str]:
    """Returns an environment with Mosaic from the build and all else from this tree."""
    paths = [str(BUILT / "lib"), str(TOP), str(TOP / "tests")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def versions() -> dict[str, str]:
    """Returns the versions of installed packages."""
    result = {}
    for package in PACKAGES:
        try:
            result[package.name] = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result
