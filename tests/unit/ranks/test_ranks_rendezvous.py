"""The rendezvous of ranks, also in a store that ranks of an earlier start have used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.ranks.world.world import rendezvous


def test_ranks_meet_in_a_store_again_and_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeps_the_file = dist.FileStore(str(tmp_path / "store"), 2)
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found: list[Any] = []

        def join(rank: int, found: list[Any] = found) -> None:
            found.append(rendezvous(dist.FileStore(str(tmp_path / "store"), 2), rank, 2, timeout_s=20.0))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (members, first), (_, second) = found
        assert [member.rank for member in members] == [0, 1]
        assert not first.check(["seen"]), "no other rendezvous uses this part of the store"
        first.set("seen", "")
        assert second.check(["seen"])
    del keeps_the_file


def test_a_rank_that_does_not_come_is_named(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(BackendUnavailableError, match=r"rank 0 has not come after 0\.1 s"):
        rendezvous(store, 1, 2, timeout_s=0.1)
