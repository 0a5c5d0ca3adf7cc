"""The cost model of several ranks: a profile's times with what ranks send each other."""

from __future__ import annotations

import torch
from planning_cases import flat, profile_of
from torch import nn

from mosaic.hardware import Link
from mosaic.profile import Phase
from mosaic.ranks.choosing.plans import cost_of_ranks
from mosaic.ranks.running.prepare import find_with_rows

NAMES = ["0", "1"]


def test_a_profile_that_is_given_has_its_own_sums_and_routing_is_added():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    finding, _ = find_with_rows(model, torch.randn(6, 5), NAMES)
    profile = profile_of(dict.fromkeys(NAMES, flat(3.0)), num_slots=1, degrees=(1, 2))
    ring = Link(latency_us=1000.0, gb_per_s=1e-5)
    given = cost_of_ranks(model, finding, profile, ring, 2, sums_over_ring=False)
    made = cost_of_ranks(model, finding, profile, ring, 2)
    assert given.time_ms("0", Phase.BACKWARD, 2, 1) == 3.0  # no rows travel, and its sum is in it
    assert given.time_ms("0", Phase.FORWARD, 1, 1) > 3.0
    assert given.time_ms("0", Phase.FORWARD, 1, 1) == made.time_ms("0", Phase.FORWARD, 1, 1)
    assert made.communication("0", 2, 1).reduce_ms > given.communication("0", 2, 1).reduce_ms == 0.0
