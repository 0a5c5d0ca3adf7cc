"""Builds the extensions ``mosaic._C`` and ``mosaic._search``; all else is in ``pyproject.toml``.

``_search`` is plain C++. ``_C`` needs ``cuda.h`` and nothing else of CUDA: it neither links libcuda nor asks for a
toolkit.
The header comes from the build requirement ``nvidia-cuda-runtime``, or from an installed toolkit.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

HERE = Path(__file__).parent


def cuda_include_candidates() -> Iterator[Path]:
    """Yields folders that may hold ``cuda.h``: the wheel's, then those of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted((header.parent for header in Path(root).glob("*/include/cuda.h")), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "include"
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent / "include"
    yield from sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)  # where NVIDIA's installers put it


def has_cuda_13(include: Path) -> bool:
    """Tells whether the folder's ``cuda.h`` is of CUDA 13.0 or newer, which names the partition sizes."""
    header = include / "cuda.h"
    return header.is_file() and "minSmPartitionSize" in header.read_text(encoding="utf-8", errors="replace")


def cuda_include() -> Path:
    """Returns the folder of a usable ``cuda.h``."""
    candidates = list(cuda_include_candidates())
    for folder in candidates:
        if has_cuda_13(folder):
            return folder
    looked = ", ".join(map(str, candidates)) or "no nvidia package, no CUDA_HOME, no nvcc"
    raise SystemExit(
        f"mosaic: no cuda.h of CUDA 13.0 or newer (looked in: {looked}). It comes with a wheel of a few "
        "megabytes: run `pip install 'nvidia-cuda-runtime>=13.0'`, or point CUDA_HOME at a toolkit."
    )


class BuildExtension(build_ext):
    """Adds what only a build needs, so that making an sdist asks for no ``cuda.h``."""

    def build_extensions(self) -> None:
        """Compiles with the header found and, in CI, with warnings as errors."""
        for extension in self.extensions:
            if extension.name == "mosaic._C":
                # A system include: warnings in CUDA's own header are not ours to mend.
                extension.extra_compile_args += ["-isystem", str(cuda_include())]
            if os.environ.get("MOSAIC_WERROR") == "1":
                extension.extra_compile_args += ["-Wall", "-Wextra", "-Werror"]
        super().build_extensions()


def extension(
    name: str, folder: str, bindings: list[str], libraries: list[str], compile_args: list[str] | None = None
) -> Pybind11Extension:
    """Describes the extension of all sources below a folder and the files that know Python."""
    return Pybind11Extension(
        name,
        [*sorted(str(path.relative_to(HERE)) for path in (HERE / folder).rglob("*.cpp")), *bindings],
        depends=sorted(str(path.relative_to(HERE)) for path in (HERE / folder).rglob("*.h")),
        include_dirs=["csrc"],
        libraries=libraries,
        extra_compile_args=list(compile_args or ()),
        cxx_std=17,
    )


# Where a processor can multiply and add in one step, compilers do so unless told not to. That rounds once in place of
# twice, and a search that compares such sums would choose another plan there.
SAME_ON_ANY_MACHINE = ["-ffp-contract=off"]

PACKAGES = [
    *find_packages(include=["mosaic", "mosaic.*"], exclude=["mosaic.profiler", "mosaic.profiler.*"]),
    "mosaic.profiler",
]

ParallelCompile("MOSAIC_BUILD_JOBS").install()  # one compiler a core unless the variable says how many

setup(
    packages=PACKAGES,
    package_dir={"mosaic.profiler": "profiler"},
    ext_modules=[
        extension("mosaic._C", "csrc/driver", ["csrc/bindings.cpp"], ["dl"]),
        extension(
            "mosaic._search",
            "csrc/search",
            [
                "csrc/search_bindings.cpp",
                *(f"csrc/bindings/{name}.cpp" for name in ("context", "orders")),
            ],
            ["pthread"],
            SAME_ON_ANY_MACHINE,
        ),
    ],
    cmdclass={"build_ext": BuildExtension},
)
