"""What a launcher has set, and ranks of a run before that are still in the store."""

from __future__ import annotations

import threading
from dataclasses import asdict
from json import dumps
from pathlib import Path

import pytest
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.ranks.meeting.roll import Identity, Roll, call_roll, is_launched

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_process_is_one_of_several_ranks_where_a_launcher_said_so():
    assert is_launched(LAUNCHED)
    assert not is_launched({})
    assert not is_launched({**LAUNCHED, "WORLD_SIZE": "1"})


@pytest.mark.parametrize("missing", LAUNCHED)
def test_variables_that_are_set_only_in_part_are_named(missing: str):
    with pytest.raises(BackendUnavailableError, match=rf"but {missing} is not set; start it by torchrun"):
        is_launched({name: value for name, value in LAUNCHED.items() if name != missing})


@pytest.mark.parametrize("changes", [{"RANK": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}, {"MASTER_PORT": "70000"}])
def test_variables_that_make_no_sense_are_shown(changes: dict[str, str]):
    (value,) = changes.values()
    with pytest.raises(BackendUnavailableError, match=rf"make no sense.*{value}"):
        is_launched({**LAUNCHED, **changes})


def roll_of_two(path: Path, sizes: tuple[int, int] = (2, 2)) -> list[Roll | BackendUnavailableError]:
    found: list[Roll | BackendUnavailableError] = []

    def join(rank: int) -> None:
        me = Identity.of_this_process(rank, sizes[rank])
        try:
            found.append(call_roll(dist.FileStore(str(path), 2), me, timeout_s=20.0))
        except BackendUnavailableError as error:
            found.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_meet_again_in_a_store_do_not_take_their_predecessors_for_each_other(tmp_path: Path):
    keeps = dist.FileStore(str(tmp_path / "store"), 2)
    before = roll_of_two(tmp_path / "store")
    again = roll_of_two(tmp_path / "store")
    assert keeps.check(["list"])
    names = [roll.name for roll in (*before, *again) if isinstance(roll, Roll)]
    assert names[0] == names[1] != names[2] == names[3]
    for roll in again:
        assert isinstance(roll, Roll)
        assert [one.rank for one in roll.ranks] == [0, 1]


def test_a_rank_does_not_believe_a_list_of_a_run_before_it(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    old = [asdict(Identity.of_this_process(rank, 2)) for rank in range(2)]
    store.set("list", dumps({"name": "old", "ranks": old}))
    store.set("old/answered/0", "")
    with pytest.raises(BackendUnavailableError, match=r"rank 0 has not come after 0\.1 s"):
        call_roll(store, Identity.of_this_process(1, 2), timeout_s=0.1)


def test_ranks_that_count_each_other_differently_are_told(tmp_path: Path):
    said = [str(error) for error in roll_of_two(tmp_path / "store", (2, 3))]
    assert any("different WORLD_SIZE" in text and "rank 1: 3" in text for text in said)
