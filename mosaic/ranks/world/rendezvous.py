"""The rendezvous of all ranks in torch.distributed's store, which names those that do not come."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mosaic.errors import BackendUnavailableError

CPU = torch.device("cpu")
_POLL_S = 0.02
_LAST_S = 1.0
"""Seconds that rank 0, which may hold the store, stays after a failed rendezvous."""


class Member(NamedTuple):
    """The process of one rank."""

    rank: int
    host: str
    pid: int
    kind: str = "cpu"
    """The type of its device."""
    gpu: str = ""
    """A text that names its GPU among all machines; empty where torch does not tell, or there is none."""

    @staticmethod
    def of_this_process(rank: int, device: torch.device) -> Member:
        host, properties = socket.gethostname(), None
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
        return Member(rank, host, os.getpid(), device.type, "" if uuid is None else f"{host} {uuid}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


def rendezvous(
    store: Store, rank: int, size: int, *, timeout_s: float, device: torch.device = CPU
) -> tuple[tuple[Member, ...], Store]:
    """Waits until all ranks have written themselves to the store.

    Keys contain the number of torchrun's restart, and how often all ranks have met before.

    Returns:
        All ranks, and a part of the store that no other rendezvous uses.

    Raises:
        BackendUnavailableError: Some ranks have not come, or are not on a GPU each, or all on CPUs; names them. Or the
            store is gone.
    """
    try:
        attempt = PrefixStore(f"mosaic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        own = PrefixStore(f"{(attempt.add('arrivals', 1) - 1) // size}", attempt)
        own.set(f"member/{rank}", json.dumps(Member.of_this_process(rank, device)))
        keys = [f"member/{other}" for other in range(size)]
        deadline = time.monotonic() + timeout_s
        while not own.check(keys):
            if time.monotonic() > deadline:
                absent = [str(other) for other, key in enumerate(keys) if not own.check([key])]
                if rank == 0:
                    time.sleep(_LAST_S)
                raise BackendUnavailableError(
                    f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(absent)} "
                    f"{'has' if len(absent) == 1 else 'have'} not come after {timeout_s:g} s; read what these "
                    "processes printed, or raise timeout_s if they only start slowly",
                    found=f"{size - len(absent)} of {size} ranks",
                    needed="all of them to call mosaic.colocate",
                )
            time.sleep(_POLL_S)
        members = tuple(Member(*json.loads(own.get(key))) for key in keys)
    except dist.DistError as error:
        raise BackendUnavailableError(
            "the store is gone: rank 0, or torchrun's agent where there is one, holds it and has ended; read what "
            "it printed",
            found=str(error).splitlines()[0],
            needed="all ranks to call mosaic.colocate",
        ) from error
    check_devices(members)
    return members, own


def check_devices(members: Sequence[Member]) -> None:
    """Raises BackendUnavailableError if some ranks are on GPUs and others are not, or two are on one."""
    kind = members[0].kind
    unlike = [f"rank {member.rank} on {member.kind}" for member in members if member.kind != kind]
    if unlike:
        raise BackendUnavailableError(
            "all ranks have to be on GPUs, or none; move the model to cuda:$LOCAL_RANK on every rank",
            found="; ".join(unlike),
            needed=f"{kind} as on rank 0",
        )
    first = {member.gpu: member.rank for member in reversed(members)}
    shared = [member for member in members if member.gpu and first[member.gpu] != member.rank]
    if shared:
        raise BackendUnavailableError(
            "each rank needs a GPU of its own; move the model to cuda:$LOCAL_RANK on every rank",
            found="; ".join(f"rank {member.rank} is on that of rank {first[member.gpu]}" for member in shared),
            needed=f"{len(members)} GPUs",
        )


def open_store(rank: int, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Store:
    """Returns the launcher's store, which torchrun's agent holds, or else rank 0; does not wait for all ranks.

    ``torch.distributed.init_process_group`` waits in its own store, and does not name ranks that are absent.

    Raises:
        BackendUnavailableError: There is no store at the launcher's address.
    """
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(  # type: ignore[attr-defined, no-any-return]
            address,
            port,
            is_master=rank == 0 and not agent,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise BackendUnavailableError(
            f"{'the agent of torchrun' if agent else 'rank 0'} has not come after {timeout_s:g} s: there is no store "
            f"at {address}:{port}",
            found=str(error).splitlines()[0],
            needed="MASTER_ADDR and MASTER_PORT of a run that is starting",
        ) from error
