"""Freeing threads that are blocked in messages to ranks that will not answer, and telling what they raise then."""

from __future__ import annotations

import contextlib
import datetime

import torch
import torch.distributed as dist

_OF_MESSAGES = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_TAG = 0x6D6F73  # of messages that nobody sends


def free(group: dist.ProcessGroup) -> None:
    """Has every call that is blocked in a group raise an error; the group is of no use afterwards.

    NCCL's groups are aborted, and NCCL's part of groups that have one for each kind of device. Gloo's ``abort`` does
    not reach calls that are blocked (torch 2.13), but a receive that times out closes all connections of its group at
    once, and that ends them: so one is made to.
    """
    backend = dist.get_backend(group)
    if "nccl" in backend:
        group.abort()
    if backend == dist.Backend.NCCL:
        return
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.zeros(1)], peer, _TAG).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
            # This one's connection is closed already: nothing timed out, and others may still be open.


def free_all(groups: list[dist.ProcessGroup]) -> None:
    """Frees what is blocked in any of some groups."""
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # closed already, or destroyed by the loop
            free(group)


def is_of_messages(error: BaseException) -> bool:
    """Whether an error comes from torch.distributed's connections, rather than from what was computed."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_MESSAGES)
