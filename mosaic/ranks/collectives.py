"""How many SMs a communicator's collectives may take."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def group_options(backend: str, max_ctas: int | None) -> Any:
    """Returns what ``torch.distributed.new_group`` is given for a communicator that is held to ``max_ctas`` SMs.

    NCCL runs one CTA a channel, each on an SM of its own; this bounds them for the one communicator, unlike the
    variable ``NCCL_MAX_CTAS``, which bounds all of the process. Not tried on GPUs.

    Args:
        backend: Of the group.
        max_ctas: At most so many; None for as many as NCCL likes.

    Returns:
        None for communicators that run on no SMs, and where there is no bound.
    """
    if backend != "nccl" or max_ctas is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = max_ctas
    return options
