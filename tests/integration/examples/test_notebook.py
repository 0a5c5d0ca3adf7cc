"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, and of a busy machine
NOTEBOOK = Path(__file__).parents[3] / "examples" / "quickstart.ipynb"


def test_the_notebook_runs_and_holds_no_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names: dict[str, Any] = {}
    for source in ("".join(cell["source"]) for cell in cells):
        if source.startswith("!mosaic "):
            subprocess.run([sys.executable, "-m", *shlex.split(source[1:])], check=True, timeout=600)
        elif "\ntimeline_figure(" in source:
            *lines, last = source.splitlines()
            exec("\n".join(lines), names)
            assert isinstance(eval(last, names), Figure)
        else:
            exec(source, names)
    assert names["handle"].metrics().keys() >= {"steps", "overlap"}
    assert (tmp_path / "checkpoints").is_dir()
