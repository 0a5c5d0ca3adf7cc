"""The command line of the stories, and one thread for equal bits."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

Command = Callable[..., int]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are equal at equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def mosaic_command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """``python -m mosaic WORDS``, in this process; returns the exit code."""

    def run(*words: object) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["mosaic", *map(str, words)])
            patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # which the command sets for its own process
            patch.delitem(sys.modules, "mosaic.__main__", raising=False)  # runpy warns of one that is there
            with pytest.raises(SystemExit) as ended:
                runpy.run_module("mosaic", run_name="__main__")
        return int(ended.value.code or 0)

    return run


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A user's file with a function ``make``."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.image = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))\n"
        "        self.text = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))\n"
        "    def forward(self, pixels, words):\n"
        "        return (self.image(pixels) * self.text(words)).sum(-1)\n"
        "def make():\n"
        "    return Net(), {'pixels': torch.randn(16, 64), 'words': torch.randn(16, 32)}\n"
    )
    return path
