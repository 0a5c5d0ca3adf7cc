"""Freeing threads that are blocked in messages to ranks that will not answer, and telling what they raise then."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

EXIT_CODE = 75
"""Of a process that had to be ended: a temporary failure, in the words of sysexits.h."""

_OF_MESSAGES = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_TAG = 0x6D6F73  # of messages that nobody sends


def free_all(groups: Sequence[dist.ProcessGroup]) -> None:
    """Has every call that is blocked in any of some groups raise an error; the groups are of no use afterwards.

    NCCL's groups are aborted, and NCCL's part of groups that have one for each kind of device: all of them in one NCCL
    group call, since kernels of one communicator may wait for another's, and aborts one by one then wait forever
    (pytorch#119797).
    """
    kinds: list[tuple[dist.ProcessGroup, str]] = []
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the loop
            kinds.append((group, dist.get_backend(group)))
    nccl = [group for group, kind in kinds if "nccl" in kind]
    with _one_abort(nccl):
        for group in nccl:
            with contextlib.suppress(RuntimeError, ValueError):  # closed already
                group.abort()
    for group, kind in kinds:
        if "gloo" in kind or "nccl" not in kind:
            with contextlib.suppress(RuntimeError, ValueError):
                _close_connections(group)


def free_within(groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
    """Frees what is blocked like ``free_all``, and ends the process if that takes longer than ``limit_s``."""
    freeing = threading.Thread(target=free_all, args=(groups,), name="mosaic-freeing", daemon=True)
    freeing.start()
    freeing.join(limit_s)
    if freeing.is_alive():
        sys.stderr.write(
            f"mosaic: {len(groups)} communicators were not aborted within {limit_s:g} s; this process is ended now, "
            f"with exit code {EXIT_CODE}\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)


@contextlib.contextmanager
def _one_abort(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """A block whose aborts NCCL begins together."""
    backend: Any = None
    for group in groups:
        with contextlib.suppress(RuntimeError):  # this group has no NCCL communicator
            backend = group._get_backend(torch.device("cuda"))
            break
    start = getattr(backend, "_group_start", None) or getattr(backend, "_start_coalescing", None)
    if start is None:
        yield
        return
    start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # nccl2 ends its group on a communicator that is aborted by then
            (getattr(backend, "_group_end", None) or backend._end_coalescing)()


def _close_connections(group: dist.ProcessGroup) -> None:
    """Ends calls of gloo's: its ``abort`` does not reach those that are blocked (torch 2.13).

    A receive that times out closes all connections of its group at once, and that ends them: so one is made to.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.zeros(1)], peer, _TAG).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
            # This one's connection is closed already: nothing timed out, and others may still be open.


def is_of_messages(error: BaseException) -> bool:
    """Whether an error comes from torch.distributed's connections, rather than from what was computed."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_MESSAGES)
