"""Aborting communicators whose calls wait for ranks that will not answer."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

EXIT_CODE = 75
"""The exit code of a process that had to be ended: a temporary failure, in the words of sysexits.h."""

_COMMUNICATION = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "closed", "aborted")
_TAG = 0x6D6F73  # of messages that no rank sends


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Makes every call that is blocked in some groups raise an error; the groups are of no use afterwards.

    NCCL's groups, and NCCL's part of mixed groups, are aborted in one NCCL group call: kernels of one communicator may
    wait for another's, and aborts one by one then wait forever (pytorch#119797).
    """
    backends: list[tuple[dist.ProcessGroup, str]] = []
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the loop
            backends.append((group, dist.get_backend(group)))
    nccl = [group for group, backend in backends if "nccl" in backend]
    with _one_abort(nccl):
        for group in nccl:
            with contextlib.suppress(RuntimeError, ValueError):  # closed already
                group.abort()
    for group, backend in backends:
        if "gloo" in backend or "nccl" not in backend:
            with contextlib.suppress(RuntimeError, ValueError):
                _close_connections(group)


def abort_within(groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
    """Aborts groups, and ends the process if that takes longer than ``limit_s``."""
    thread = threading.Thread(target=abort_groups, args=(groups,), name="mosaic-abort", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
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
    """Ends the calls of a gloo group, whose ``abort`` does not reach those that are blocked (torch 2.13).

    A receive that times out closes all connections of its group at once.
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.zeros(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
            # This connection is closed already: nothing timed out, and others may still be open.


def is_communication_error(error: BaseException) -> bool:
    """Returns whether an error comes from torch.distributed's connections, rather than from a computation."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _COMMUNICATION)
