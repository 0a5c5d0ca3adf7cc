"""One run at a time: the lock, and the lease beside it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mosaic.artifact import load, save
from mosaic.retrain.lock import FolderInUseError, Lease, held
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
ELSEWHERE = Lease(host="another-machine", pid=17, since="2026-11-21T01:00:00+00:00")


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
        with held(tmp_path, NOW, wait_s=0.0):  # though its child lives on, and its lease lies there
            assert load(Lease, tmp_path / "lease.json").pid == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.communicate()


def test_a_lease_of_another_machine_counts_while_it_beats(tmp_path: Path):
    lease = tmp_path / "lease.json"
    save(ELSEWHERE, lease)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            lease.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(FolderInUseError, match="process 17 on another-machine"), held(tmp_path, NOW, wait_s=5.0):
        pass
    ended.set()
    thread.join()
    with held(tmp_path, NOW, wait_s=0.3):
        assert load(Lease, lease).host == socket.gethostname()
