"""Comparison of the ranks' plans before other communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from mosaic.context.plan import ContextPlan
from mosaic.errors import RankFailedError


def check_agreement(plan: ContextPlan, group: Any, device: torch.device) -> int:
    """Compares the plans of all ranks of a group by their hashes; returns this rank's place in the group.

    Raises:
        RankFailedError: The plans differ; lists the ranks.
        ValueError: The size of the group differs from the plan.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != plan.ranks:
        raise ValueError(
            f"the plan is for {plan.ranks} ranks and the group has {size}; plan with ranks={size}, or pass the group "
            "of the ranks that share this sequence"
        )
    own = torch.tensor([int(plan.digest()[:15], 16)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own, group=group)
    hashes = [int(each) for each in gathered]
    usual = Counter(hashes).most_common(1)[0][0]
    others = [place for place, each in enumerate(hashes) if each != usual]
    if others:
        raise RankFailedError(
            f"ranks {others} of the context group have another mask, block size or distribution than the rest; all "
            "ranks of a context group need the same sequence: load data by the data-parallel rank, not by the global "
            "one",
            ranks=others,
        )
    return int(rank)
