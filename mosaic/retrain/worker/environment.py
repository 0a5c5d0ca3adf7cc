"""The environment that bits depend on, beside data and weights: versions, device, threads, settings."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch

import mosaic
from mosaic.provenance import Provenance
from mosaic.retrain.records import Environment


def environment_here(device: torch.device, *, num_ranks: int, program: str) -> Environment:
    """Reads this process's environment; ``program`` is the SHA-256 of the user's file."""
    name = "cpu"
    if device.type == "cuda":
        driver = next((word for word in _words("/proc/driver/nvidia/version") if word[:1].isdigit()), "unknown")
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, driver {driver}"
    processor = " ".join(_words("/proc/cpuinfo", "model name")) or platform.machine()
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        mosaic=mosaic.__version__,
        commit=Provenance.here().commit,
        machine=f"{processor}, {platform.system()} {platform.release()}",
        device=name,
        threads=torch.get_num_threads(),
        num_ranks=num_ranks,
        tf32=torch.get_float32_matmul_precision() != "highest",
        program=program,
    )


def use_repeatable_kernels(device: torch.device) -> None:
    """Selects deterministic kernels; torch warns about operators without one."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA is first used
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # True would fill each uninitialized tensor: 620 times in a step of six transformer layers.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _words(path: str, start: str = "") -> list[str]:
    """Returns the words of a file's first line that begins with a text, after its colon; none without the file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith(start)), [])
