"""One run at a time."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mosaic.retrain.lock import FolderInUseError, held
from mosaic.retrain.lock import holder as stands

NOW = "2026-11-22T01:00:00+00:00"
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from mosaic.retrain.lock import held
with held(Path(sys.argv[1]), "2026-11-21T01:00:00+00:00"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_lock_that_cannot_be_opened_leaves_the_rest_of_the_status(tmp_path: Path):
    (tmp_path / "lock").mkdir()
    assert stands(tmp_path).startswith("its lock cannot be opened (")


def test_the_second_run_says_who_has_the_folder_and_leaves_and_a_killed_one_frees_it_at_once(tmp_path: Path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        who = f"process {holder.pid} on {socket.gethostname()} since 2026-11-21T01:00:00"
        with pytest.raises(FolderInUseError, match=who), held(tmp_path, NOW, wait_s=0.0):
            pass
        assert stands(tmp_path).startswith(f"in use by {who}")
        holder.kill()
        holder.wait()
        assert re.fullmatch(f"no run holds it: {who}.* has died, .*", stands(tmp_path))
        with held(tmp_path, NOW, wait_s=0.0):  # though its child lives on
            pass
        assert stands(tmp_path) == "no run holds it"
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.communicate()
