"""The rendezvous of ranks, also in a store that ranks of an earlier start have used."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.ranks.world.rendezvous import Members, is_launched

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_process_is_one_of_several_ranks_where_a_launcher_said_so():
    assert is_launched(LAUNCHED)
    assert not is_launched({})
    assert not is_launched({**LAUNCHED, "WORLD_SIZE": "1"})


def test_variables_that_are_set_only_in_part_are_named():
    for missing in LAUNCHED:
        with pytest.raises(BackendUnavailableError, match=rf"but {missing} is not set; start it by torchrun"):
            is_launched({name: value for name, value in LAUNCHED.items() if name != missing})


def test_ranks_meet_in_a_store_again_and_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keeps_the_file = dist.FileStore(str(tmp_path / "store"), 2)
    names = []
    for attempt in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found: list[Members] = []

        def join(rank: int, found: list[Members] = found) -> None:
            found.append(Members.gather(dist.FileStore(str(tmp_path / "store"), 2), rank, 2, timeout_s=20.0))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0].name == found[1].name
        assert [one.rank for one in found[0].ranks] == [0, 1]
        names.append(found[0].name)
    assert len(set(names)) == 3
    del keeps_the_file


def test_a_rank_that_does_not_come_is_named(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(BackendUnavailableError, match=r"rank 0 has not come after 0\.1 s"):
        Members.gather(store, 1, 2, timeout_s=0.1)
