"""Builds the fake CUDA driver and runs child processes against it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent

LOADED = ("ctypes", "json", "threading", "mosaic._C")
WITH_TORCH = ("torch._dynamo", "fake_streams", "mosaic.backends.cuda.driver")
"""Modules that are loaded before children are forked, with torch for those that import it."""

# Names that every child has: the library through ctypes, and the error of a call as plain data.
PRELUDE = """
import ctypes, json
fake = ctypes.CDLL("libcuda.so.1")
def count(what, name):
    return getattr(fake, "mosaic_fake_" + what)(name.encode())
def words(name):
    tell = getattr(fake, "mosaic_fake_" + name)
    tell.restype = ctypes.c_char_p
    return tell().decode().split()
def called():
    return words("called")
def misused():
    return words("misused")
def leaked():
    kinds = ["primary", "green", "stream", "library", "memory"]
    left = {kind: count("created", kind) - count("destroyed", kind) for kind in kinds}
    return {kind: number for kind, number in left.items() if number}
def error_of(call):
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), **vars(error)}
    return None
"""


class Nursery:
    """A process from which children are forked; see ``fake_driver.children``."""

    def __init__(self, folder: Path, modules: tuple[str, ...]) -> None:
        self._places = [Path(tempfile.mkdtemp(prefix="children", dir=folder)) / name for name in ("output", "errors")]
        path = os.pathsep.join(place for place in sys.path if place)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "fake_driver.children", *modules],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.kill)

    def run(self, body: str, environment: dict[str, str]) -> str:
        """Runs a body in a child to its end; returns what it wrote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output, errors = self._places
        asked = {"body": body, "environment": environment, "output": str(output), "errors": str(errors)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        assert code == "0", f"exit code {code}\n{errors.read_text()}"
        return output.read_text()


_nursery = functools.cache(Nursery)


@dataclass(frozen=True)
class FakeDriver:
    """A folder with a ``libcuda.so.1`` in it; nothing of this process is touched."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> FakeDriver:
        """Compiles the sources into ``folder/libcuda.so.1``, as one unit."""
        folder.mkdir(parents=True, exist_ok=True)
        command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-x", "c++", "-"]
        unit = "".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp")))
        command += ["-o", str(folder / "libcuda.so.1")]
        built = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        return cls(folder)

    def environment(self, **settings: str | int) -> dict[str, str]:
        """The child's environment: ``devices="132:9.0"``, ``version=13000``, ``fail=...``, ``quirk=...``."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MOSAIC_FAKE", "CUDA_"))}
        told = {f"MOSAIC_FAKE_{name.upper()}": str(value) for name, value in settings.items()}
        return {**kept, **told, "LD_LIBRARY_PATH": str(self.folder)}

    def run(self, body: str, **settings: str | int) -> Any:
        """Runs the body in a child and returns what it leaves in ``result``, by way of JSON."""
        script = f"{PRELUDE}\n{body}\nprint(json.dumps(result))"
        modules = LOADED + (WITH_TORCH if "import torch" in body else ())
        return json.loads(_nursery(self.folder, modules).run(script, self.environment(**settings)).splitlines()[-1])
