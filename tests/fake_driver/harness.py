"""Builds the fake CUDA driver and runs child processes against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent

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


def compile_library(folder: Path, *sources: Path) -> Path:
    """Compiles sources into ``folder/libcuda.so.1`` and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    target = folder / "libcuda.so.1"
    built = subprocess.run([*command, "-o", target, *sources], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@dataclass(frozen=True)
class FakeDriver:
    """A folder with a ``libcuda.so.1`` in it; nothing of this process is touched."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> FakeDriver:
        return cls(compile_library(folder, *sorted(SOURCES.glob("*.cpp"))))

    def environment(self, **settings: str | int) -> dict[str, str]:
        """The child's environment: ``devices="132:9.0"``, ``version=13000``, ``fail=...``, ``quirk=...``."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MOSAIC_FAKE", "CUDA_"))}
        told = {f"MOSAIC_FAKE_{name.upper()}": str(value) for name, value in settings.items()}
        return {**kept, **told, "LD_LIBRARY_PATH": str(self.folder)}

    def run(self, body: str, **settings: str | int) -> Any:
        """Runs the body in a child and returns what it leaves in ``result``, by way of JSON."""
        script = f"{PRELUDE}\n{body}\nprint(json.dumps(result))"
        child = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert child.returncode == 0, f"exit code {child.returncode}\n{child.stderr}"
        return json.loads(child.stdout.splitlines()[-1])
