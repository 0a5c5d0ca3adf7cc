"""The order of NCCL's launches, and groups of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mosaic.errors import BackendUnavailableError
from mosaic.ranks.world.groups import LAUNCH_ORDER, no_splits, set_launch_order


@pytest.mark.parametrize(
    ("environ", "num_collectives", "found"),
    [
        ({}, 3, "3 collectives of NCCL before mosaic.colocate, without NCCL_LAUNCH_ORDER_IMPLICIT"),
        ({}, None, "an unknown number of collectives"),
        ({LAUNCH_ORDER: "0"}, 0, "NCCL_LAUNCH_ORDER_IMPLICIT=0"),
    ],
)
def test_an_order_of_launches_that_nccl_does_not_keep_is_refused(
    environ: dict[str, str], num_collectives: int | None, found: str
):
    with pytest.raises(BackendUnavailableError, match=rf"export NCCL_LAUNCH_ORDER_IMPLICIT=1.*{found}"):
        set_launch_order(environ, num_collectives=num_collectives)


def test_the_order_of_launches_is_set_before_nccl_s_first_collective_or_was_set_by_the_user():
    environ: dict[str, str] = {}
    set_launch_order(environ, num_collectives=0)
    assert environ == {LAUNCH_ORDER: "1"}
    set_launch_order(environ, num_collectives=7)


def test_new_groups_are_no_split_of_a_default_group_that_is_bound_to_a_device():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        world.bound_device_id = device = torch.device("cuda", 0)
        with no_splits():
            assert world.bound_device_id is None
            dist.destroy_process_group(dist.new_group(backend="gloo"))
        assert world.bound_device_id == device
    finally:
        world.bound_device_id = None
        dist.destroy_process_group()
