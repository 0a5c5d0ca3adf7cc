"""Who the ranks are: each says so at the start, in torch.distributed's store, and those that do not come are named."""

from __future__ import annotations

import datetime
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mosaic.errors import BackendUnavailableError

_LOOK_S = 0.02
_HEARD_S = 2.0
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
    mark: str
    """Differs from that of any other process and roll."""

    @staticmethod
    def of_this_process(rank: int, size: int) -> Identity:
        """Returns this process's."""
        host = socket.gethostname()
        namespace = Path("/proc/self/ns/pid")
        inside = str(namespace.readlink()) if namespace.exists() else ""
        boot = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
        booted = boot.read_text().strip() if boot.exists() else ""
        home = f"{host} {booted} {inside}"
        return Identity(rank=rank, size=size, host=host, pid=os.getpid(), home=home, mark=uuid.uuid4().hex)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """Ranks that have met."""

    name: str
    """Differs from that of any other roll."""
    ranks: tuple[Identity, ...]
    """All of them, in order."""
    store: Store
    """A part of the store that no other roll has used, of this run or of one before its restart."""


def call_roll(store: Store, me: Identity, *, timeout_s: float) -> Roll:
    """Waits until all ranks have said who they are.

    torchrun's agent keeps its store when it restarts the ranks, with all that their predecessors wrote. So rank 0 makes
    up a name for this roll and lists who came; a rank believes a list only if it is on it with its own new mark, and
    answers under that name. Whoever has not answered has not come.

    Args:
        store: Shared by the ranks, and used for nothing else.
        me: This rank.
        timeout_s: How long to wait for the others.

    Raises:
        BackendUnavailableError: Some have not come; names them. Or ranks believe that there are other numbers of them,
            or whoever holds the store has ended.
    """
    try:
        return _called(store, me, timeout_s)
    except dist.DistError as error:
        raise BackendUnavailableError(
            "the store is gone: rank 0, or torchrun's agent where there is one, holds it and has ended; look at what "
            "it printed",
            found=str(error).splitlines()[0],
            needed="all ranks to call mosaic.colocate",
        ) from error


def _called(store: Store, me: Identity, timeout_s: float) -> Roll:
    store.set(f"came/{me.rank}", dumps(asdict(me)))
    name, deadline, listed = uuid.uuid4().hex, time.monotonic() + timeout_s, ""
    while True:
        if me.rank == 0:
            listed = _listed(store, me.size, name, listed)
        ranks = _those_listed(store, me)
        if ranks:
            _check_sizes(ranks)
            name = _name_of(store)
            store.set(f"{name}/answered/{me.rank}", "")
        answers = [rank for rank in range(me.size) if ranks and store.check([f"{name}/answered/{rank}"])]
        if len(answers) == me.size:
            return Roll(name=name, ranks=_those_listed(store, me), store=PrefixStore(name, store))
        if ranks and store.check([f"{name}/absent"]):
            store.set(f"{name}/heard/{me.rank}", "")
            raise _not_there(loads(store.get(f"{name}/absent")), me.size, timeout_s)
        if time.monotonic() > deadline:
            absent = [rank for rank in range(me.size) if rank not in answers] if ranks else [0]
            if me.rank == 0:  # it may hold the store, and would be missed itself if it left first
                _tell(store, name, absent, answers)
            raise _not_there(absent, me.size, timeout_s)
        time.sleep(_LOOK_S)


def _tell(store: Store, name: str, absent: Sequence[int], present: Sequence[int]) -> None:
    """Tells those who came, as rank 0, who has not; waits for a moment until they have heard."""
    store.set(f"{name}/absent", dumps(absent))
    deadline = time.monotonic() + _HEARD_S
    keys = [f"{name}/heard/{rank}" for rank in present if rank]
    while time.monotonic() < deadline and not all(store.check([key]) for key in keys):
        time.sleep(_LOOK_S)


def _listed(store: Store, size: int, name: str, before: str) -> str:
    """Lists the ranks that came, as rank 0; returns the list."""
    names = [f"came/{rank}" for rank in range(size)]
    came = [loads(store.get(each)) for each in names if store.check([each])]
    listed = dumps({"name": name, "ranks": came})
    if listed != before:
        store.set("list", listed)
    return listed


def _those_listed(store: Store, me: Identity) -> tuple[Identity, ...]:
    """Returns the ranks on the list, if this one is on it."""
    if not store.check(["list"]):
        return ()
    ranks = tuple(Identity(**each) for each in loads(store.get("list"))["ranks"])
    return ranks if me in ranks else ()


def _name_of(store: Store) -> str:
    return str(loads(store.get("list"))["name"])


def _not_there(absent: Sequence[int], size: int, timeout_s: float) -> BackendUnavailableError:
    several = len(absent) > 1
    return BackendUnavailableError(
        f"rank{'s' if several else ''} {', '.join(map(str, absent))} {'have' if several else 'has'} not come after "
        f"{timeout_s:g} s; look at what these processes printed, or raise timeout_s if they are only slow to start",
        found=f"{size - len(absent)} of {size} ranks",
        needed="all of them to call mosaic.colocate",
    )


def _check_sizes(ranks: Sequence[Identity]) -> None:
    sizes = "; ".join(f"rank {one.rank}: {one.size}" for one in ranks if one.size != ranks[0].size)
    if sizes:
        raise BackendUnavailableError(
            "the ranks were started with different WORLD_SIZE",
            found=sizes,
            needed=f"{ranks[0].size} as on rank {ranks[0].rank}",
        )


def default_store() -> Store:
    """Returns a part of the default group's store, over a connection of its own: calls that wait hold up no others."""
    return PrefixStore("mosaic", dist.group.WORLD.get_group_store().clone())  # type: ignore[union-attr]


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
    """Returns a store for the ranks of a launcher, this rank, and their number.

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
    roll = call_roll(PrefixStore("mosaic", store), Identity.of_this_process(rank, size), timeout_s=timeout_s)
    return roll.store, rank, size
