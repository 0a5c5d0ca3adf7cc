"""A stream pool: layouts over one split, lending by look-up, what it tells; against the fake driver."""

from __future__ import annotations

from fake_driver.harness import FakeDriver
from fake_driver.pools import run_pools

REFUSED = {
    "pool.add_layout([])": "layout=[] has no partition",
    "pool.add_layout([[0], []])": "slots=[] is empty, but a partition needs a slot; name some of 0 to 15",
    "pool.add_layout([[0, 16]])": "slots=[0, 16] names slot 16, but this split has 16 slots; use 0 to 15",
    "pool.add_layout([[0, 1], [2], [3, 1]])": "slot 1 is in partitions 0 and 2",
    "pool.lend(1, 0)": "layout=1 is none of the 1 layouts",
    "pool.lend(0, 2)": "partition=2 is none of the 2 partitions of layout 0",
    "pool.partitions(1)": "layout=1 is none",
    "pool.give_back(12345)": "stream=12345 is not lent by this pool",
    "[pool.give_back(stream) for stream in [pool.lend(0, 0)] * 2]": "is not lent by this pool",
    "pool_of([[3, 1, 3]])": "names slot 3 twice, but a partition is a set; name each slot once",
    "pool_of(HALVES, placement='best')": "placement='best' is not known; use 'merged' or 'split'",
}


def test_a_wrong_argument_is_refused_with_the_way_out_and_changes_nothing(fake_driver: FakeDriver):
    body = f"""
pool = pool_of(HALVES)
def state():
    return public(pool.stats()) | {{"layouts": len(pool.stats().layouts), "num_lent": 0}}
def refused(call):
    before, error = state(), error_of(lambda: eval(call, globals()))
    return [error, before == state(), count("created", "green") - count("destroyed", "green")]
result = [refused(call) for call in {list(REFUSED)!r}]
"""
    answers = run_pools(fake_driver, body)
    for (error, unchanged, contexts), words in zip(answers, REFUSED.values(), strict=True):
        assert error["kind"] == "ValueError"
        assert words in error["text"]
        assert (unchanged, contexts) == (True, 2)
