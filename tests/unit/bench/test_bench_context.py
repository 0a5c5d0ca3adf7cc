"""The study of long sequences, in small."""

from __future__ import annotations

from itertools import chain

from bench.context import balance, planning
from bench.context.__main__ import packed_blocks


def test_planning_is_timed_and_ranks_come_out_even():
    figures = chain(
        planning.planning("mp", 2048, (2,)),
        balance.balance("ee", 4096, 4, 2),
        balance.received("mp of ~1k, 16384 tokens", lambda seed: packed_blocks(16384, 1024, seed), 4, 1),
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["ee, 4096 tokens, 4 ranks: lpt: most tiles over mean"] < 1.05
    timed = [value for name, value in values.items() if name.endswith(", ms")]
    assert len(timed) == 4
    assert all(value > 0 for value in timed)
