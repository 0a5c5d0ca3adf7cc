"""``mosaic.colocate``: on one rank or on several, as the process was started."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from mosaic.engine.colocate import colocate as on_one_rank
from mosaic.engine.handle import Handle
from mosaic.ranks.colocate import colocate_ranks
from mosaic.ranks.meeting.world import World

_ON_SEVERAL = {
    "sample",
    "modules",
    "exclude",
    "plan",
    "method",
    "profile",
    "settings",
    "if_busy",
    "backend",
    "timeout_s",
    "watch",
    "communication_slots",
    "direct",
    "trial",
}


@functools.wraps(on_one_rank)
def colocate(model: nn.Module, **options: Any) -> Handle:
    """Colocates a model on this process's device, or over all ranks that torchrun started."""
    if not World.is_there():
        for name in ("communication_slots", "direct"):  # nobody to communicate with
            options.pop(name, None)
        return on_one_rank(model, **options)
    refused = sorted(set(options) - _ON_SEVERAL)
    if refused:
        raise ValueError(f"{', '.join(refused)} cannot be given on several ranks; leave it out")
    return colocate_ranks(model, **options)
