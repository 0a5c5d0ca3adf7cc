"""Aborts of communicators: those of NCCL together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mosaic.ranks.world.failures import abort_groups


class Group:
    """A process group of NCCL that notes its aborts."""

    def __init__(self, name: str, events: list[str], *, fails: bool = False) -> None:
        self.name, self.events, self.fails = name, events, fails

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def _group_start(self) -> None:
        self.events.append("start")

    def _group_end(self) -> None:
        self.events.append("end")

    def abort(self) -> None:
        self.events.append(self.name)
        if self.fails:
            raise RuntimeError("closed already")


def backend_of(group: Any) -> str:
    if group.name == "destroyed":
        raise ValueError("Invalid process group specified")
    return "nccl"


def test_communicators_of_nccl_are_aborted_in_one_group(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    groups: list[Any] = [Group(name, events, fails=name == "closed") for name in ("one", "destroyed", "closed", "two")]
    monkeypatch.setattr(dist, "get_backend", backend_of)
    abort_groups(groups)
    assert events == ["start", "one", "closed", "two", "end"]


OPEN_TOKENS = """
from datetime import timedelta
import torch.distributed as dist
from mosaic import RankSettings
from mosaic.ranks.world.failures import CancelToken, Heartbeats, Member
from mosaic.ranks.world.progress import RankProgress

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
for number in range(16):  # some thread is always inside of the store
    settings, progress = RankSettings(heartbeat_s=1e-6, grace_s=20.0), RankProgress()
    heartbeats = Heartbeats([Member(0, "host", 7)], store, 0, progress, settings)
    CancelToken(heartbeats, str(number), []).__enter__()
"""


def test_a_process_that_leaves_tokens_open_ends_well():
    ended = subprocess.run([sys.executable, "-c", OPEN_TOKENS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
