"""Aborts of communicators: those of NCCL together, and within a limit of time."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mosaic.ranks.world.cancel import EXIT_CODE, abort_groups, abort_within


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


def test_a_process_whose_communicators_are_not_aborted_in_time_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ended: list[int] = []
    go_on = threading.Event()
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("mosaic.ranks.world.cancel.abort_groups", lambda groups: go_on.wait())
    abort_within([], 0.01)
    go_on.set()
    assert ended == [EXIT_CODE]
    assert "communicators were not aborted within 0.01 s" in capsys.readouterr().err
