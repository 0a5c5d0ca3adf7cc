"""Who the ranks are: each says so at the start, in torch.distributed's store, and those that do not come are named."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mosaic.errors import BackendUnavailableError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank's process."""

    rank: int
    """Its rank."""
    size: int
    """How many ranks it believes there are."""
    host: str
    """Name of its machine."""
    pid: int
    """Number of its process, in its own namespace."""
    home: str
    """Same text, same machine and namespace of processes: there, ``pid`` can be looked up."""

    @staticmethod
    def of_this_process(rank: int, size: int) -> Identity:
        """Returns this process's."""
        host = socket.gethostname()
        namespace = Path("/proc/self/ns/pid")
        inside = str(namespace.readlink()) if namespace.exists() else ""
        boot = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
        booted = boot.read_text().strip() if boot.exists() else ""
        return Identity(rank=rank, size=size, host=host, pid=os.getpid(), home=f"{host} {booted} {inside}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended; only to be asked on its own machine."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return Path("/proc/self").exists()
        return state in "ZX"


def call_roll(store: Store, me: Identity, *, timeout_s: float) -> tuple[Identity, ...]:
    """Waits until all ranks have said who they are.

    Args:
        store: Shared by the ranks, and used for nothing else under these names.
        me: This rank.
        timeout_s: How long to wait for the others.

    Returns:
        All ranks, in order.

    Raises:
        BackendUnavailableError: Some have not come; names them. Or ranks believe that there are other numbers of them.
    """
    store.set(f"here/{me.rank}", dumps(asdict(me)))
    names = [f"here/{rank}" for rank in range(me.size)]
    try:
        store.wait(names, datetime.timedelta(seconds=timeout_s))
    except dist.DistError as error:
        absent = [rank for rank, name in enumerate(names) if not store.check([name])]
        if not absent:  # the last one came this very moment
            return _all_of(store, names)
        raise BackendUnavailableError(
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} "
            f"{'have' if len(absent) > 1 else 'has'} not come after {timeout_s:g} s; look at what these processes "
            "printed, or raise timeout_s if they are only slow to start",
            found=f"{me.size - len(absent)} of {me.size} ranks",
            needed="all of them to call mosaic.colocate",
        ) from error
    return _all_of(store, names)


def _all_of(store: Store, names: Sequence[str]) -> tuple[Identity, ...]:
    came = tuple(Identity(**loads(store.get(name))) for name in names)
    sizes = "; ".join(f"rank {one.rank}: {one.size}" for one in came if one.size != came[0].size)
    if sizes:
        raise BackendUnavailableError(
            "the ranks were started with different WORLD_SIZE",
            found=sizes,
            needed=f"{came[0].size} as on rank 0",
        )
    return came


def shared_store(rank: int) -> Store:
    """Returns a part of the default group's store for one more set of ranks, over a connection of its own.

    All ranks have to ask equally often: the n-th to ask on each of them share it.
    """
    store: Any = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
    ordinal = store.add(f"mosaic/asked/{rank}", 1)
    return PrefixStore(f"mosaic/{ordinal}", store)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks.

    Raises:
        BackendUnavailableError: It set only some of its variables, or values that no launcher sets.
    """
    if not (environ.get("WORLD_SIZE") or environ.get("RANK")) or environ.get("WORLD_SIZE", "").strip() == "1":
        return False
    missing = [name for name in _VARIABLES if not environ.get(name)]
    if missing:
        found = ", ".join(f"{name}={environ[name]}" for name in _VARIABLES if environ.get(name))
        raise BackendUnavailableError(
            f"this process was started as one of several ranks, but {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set; start it by torchrun, or unset the others",
            found=found,
            needed=", ".join(_VARIABLES),
        )
    numbers = {name: environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not value.strip().isdecimal()]
    if wrong or not int(numbers["RANK"]) < int(numbers["WORLD_SIZE"]) or not int(numbers["MASTER_PORT"]) < 2**16:
        raise BackendUnavailableError(
            "the variables that torchrun sets make no sense; start this process by torchrun, or unset them",
            found=", ".join(f"{name}={value}" for name, value in numbers.items()),
            needed="whole numbers with RANK < WORLD_SIZE and MASTER_PORT < 65536",
        )
    return True


def meet(timeout_s: float, environ: Mapping[str, str] = os.environ) -> tuple[Store, int, int]:
    """Returns the store in which the ranks of a launcher meet, this rank, and their number.

    Where torchrun's agent holds the store, all are its clients; elsewhere rank 0 holds it.

    Raises:
        BackendUnavailableError: Nobody holds a store there, or some rank has not come.
    """
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=rank == 0 and not agent,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
    except dist.DistError as error:
        holder = "torchrun's agent" if agent else "rank 0"
        raise BackendUnavailableError(
            f"{holder} has not come after {timeout_s:g} s: there is no store at {address}:{port}",
            found=str(error).splitlines()[0],
            needed="MASTER_ADDR and MASTER_PORT of a run that is starting",
        ) from error
    call_roll(PrefixStore("mosaic/start", store), Identity.of_this_process(rank, size), timeout_s=timeout_s)
    return store, rank, size
