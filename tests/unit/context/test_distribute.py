from __future__ import annotations

import pickle

import numpy as np
import pytest

from bench.papers.masks import DRAWN
from mosaic.context.distribute import distribute
from mosaic.context.plan import plan_context
from mosaic.context.words import causal


def test_shares_are_what_their_names_say():
    work = np.arange(1, 9)
    found = {name: distribute(work, 2, name, chunk=1).rank_of.tolist() for name in ("ring", "headtail")}
    assert found == {"ring": [0, 0, 0, 0, 1, 1, 1, 1], "headtail": [0, 0, 1, 1, 1, 1, 0, 0]}
    assert distribute(work, 2, "ring", chunk=3).rank_of.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_a_plan_that_a_loaders_worker_made_is_the_same_here():
    made = plan_context(DRAWN["mp"](4096, 0), 4)
    arrived = pickle.loads(pickle.dumps(made))
    assert arrived.digest() == made.digest()
    assert np.array_equal(arrived.needed(), made.needed())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, -2, 3], 2), "pass one integer of 0 or more per block"),
        (([1.5, 2.5], 2), "work is float64 with minimum 1.5"),
        (([1, 2, 3], 2, "best"), "unknown method 'best'; choose one of: lpt, headtail, ring, random"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_way_out(arguments: tuple, says: str):
    with pytest.raises(ValueError, match=says):
        distribute(*arguments)


def test_a_block_without_tokens_is_refused():
    with pytest.raises(ValueError, match="block=0; use 1 token or more"):
        plan_context(causal(200), 3, block=0)
