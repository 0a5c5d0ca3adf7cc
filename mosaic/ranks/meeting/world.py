"""The ranks of a run: who they are, whether they are alike, and telling all of them what one has decided."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mosaic.device import Device
from mosaic.engine.options import RankSettings
from mosaic.errors import BackendUnavailableError, InvalidPlanError, MosaicError
from mosaic.graph import ModuleGraph
from mosaic.ranks.meeting.groups import (
    GroupKey,
    GroupPool,
    carrier_of,
    connect,
    group_options,
    meeting_under,
    num_nccl_collectives,
    set_launch_order,
)
from mosaic.ranks.meeting.progress import THE_LOOP, RankProgress
from mosaic.ranks.meeting.roll import Identity, call_roll, default_store, is_launched, meet
from mosaic.ranks.meeting.watch import Watch

TIMEOUT_S = RankSettings().timeout_s
"""How long a rank waits for another one in a step before it gives up, by default."""
PATIENCE_S = 1800.0
"""How long ranks wait while one of them profiles and solves."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What has to be the same on all ranks."""

    mosaic: str
    """Version of Mosaic."""
    torch: str
    """Version of torch."""
    device: str
    """Name of the device."""
    num_slots: int
    """Slots that it gives out."""
    sms_per_slot: int
    """SMs of a slot; 1 on the host."""
    graph: str
    """Fingerprint of the modules that the rank found in its model, whatever their inputs."""
    inputs: tuple[str, ...] = ()
    """For each module the shapes and types that it gets in the sample's step."""
    remainder_sms: int = 0
    """SMs that are no slot's."""
    nccl: str = ""
    """Version of NCCL, on GPUs."""

    @staticmethod
    def of(device: Device, graph: ModuleGraph) -> RankFacts:
        """Reads them off this process."""
        from mosaic import __version__

        shapeless = replace(graph, modules=tuple(replace(module, inputs=()) for module in graph.modules))
        return RankFacts(
            mosaic=__version__,
            torch=torch.__version__,
            device=device.name,
            num_slots=device.num_slots,
            sms_per_slot=device.sms_per_slot,
            graph=shapeless.fingerprint,
            inputs=tuple(f"{module.name!r} gets {', '.join(module.inputs)}" for module in graph.modules),
            remainder_sms=device.remainder_sms,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if device.kind == "cuda" and _has_nccl() else "",
        )


class World:
    """All ranks, over torch.distributed.

    Args:
        timeout_s: How long an exchange may take before it is an error, and how long ranks may take to come.
        watch: How ranks watch each other; None: they do not.
        device: Where this rank's tensors are; by default the CPU.

    Attributes:
        rank: This one.
        size: How many there are.
        everyone: A group of all of them that moves tensors of ``device``.
        agreements: One that moves tensors in host memory.
        device: Where this rank's tensors are.
        me: This rank's process.
        run: A text that all ranks have in common, and no other run has.
        progress: Where this one is.
        watch: Watches the others; None where nobody does.
        store: Shared by all ranks of this run, and by nobody else.
        groups: Communicators that were made and are free.
        grace_s: How long this rank's process may take to end by itself once a rank has failed.
        max_ctas: SMs that collectives of groups made from now on may take; None for as many as they like.

    Raises:
        BackendUnavailableError: There is no process group, or some rank has not come; names those. Or some are on GPUs
            and others are not, or two are on one; names those. Or NCCL does not keep the order of launches.
    """

    def __init__(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        watch: RankSettings | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise BackendUnavailableError(
                "there is no process group", found="no torch.distributed", needed="a start by torchrun"
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.progress = RankProgress()
        self.watch: Watch | None = None
        self.grace_s = (watch or RankSettings()).grace_s
        self.max_ctas: int | None = None
        self.device = device = device or torch.device("cpu")
        if device.type == "cuda" and self.size > 1:
            set_launch_order(os.environ, num_collectives=num_nccl_collectives())
        me = Identity.of_this_process(self.rank, self.size)
        roll = call_roll(default_store(), me, timeout_s=timeout_s)
        self.me, self.run, self.store = me, roll.name, roll.store
        self.groups = GroupPool(self._made, self._forget)
        if watch is not None and self.size > 1:
            holder = _holder_of(roll.ranks)
            self.watch = Watch(roll.store, roll.ranks, me, self.progress, watch, holder=holder)
            self.watch.start()
        # Rank 0 may profile for minutes while the others wait for its plan.
        self._patient = max(self.timeout, datetime.timedelta(seconds=PATIENCE_S))
        self._background: dist.ProcessGroup | None = None
        with self.opening():
            self._control = self._covered(self._new_group(self._patient))
            self.check_devices((device.type, _gpu_of(device, me)))
            self.everyone = self.group(range(self.size))
            self.agreements = self.group(range(self.size), backend="gloo") if device.type == "cuda" else self.everyone
            if self.watch is not None:
                self._covered(dist.group.WORLD)

    @classmethod
    def join(cls, device: torch.device, *, timeout_s: float = TIMEOUT_S, watch: RankSettings | None = None) -> Self:
        """Returns the ranks that torchrun started; makes the default process group unless the loop has made it."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            store, rank, size = meet(timeout_s)
            has_own_gpu = _have_own_gpus(store, rank, size, device)
            dist.init_process_group(
                backend,
                store=PrefixStore("default_pg", store),
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=device if has_own_gpu else None,  # else the world names the ranks at fault
            )
        return cls(timeout_s=timeout_s, watch=watch, device=device)

    @staticmethod
    def is_there() -> bool:
        """Whether this process is one of several ranks.

        Raises:
            BackendUnavailableError: A launcher's variables are set only in part, or make no sense.
        """
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size() > 1
        return is_launched()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """A block that ends with all ranks at work; if it fails here, the others are told and not waited for."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Stops watching, and tells the others that this rank is done, or why it could not begin."""
        if self.watch is not None:
            self.watch.stop(error)

    def group(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Returns a communicator that nobody has, by default one that moves tensors of this rank's device.

        All ranks have to ask for the same ones in the same order.
        """
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        group: dist.ProcessGroup = self.groups.take(GroupKey(tuple(ranks), backend, self.max_ctas))
        return group

    def _made(self, key: GroupKey) -> Any:
        """Makes a communicator and warms it up."""
        options = group_options(key.backend, key.max_ctas)
        with self.progress.waiting(THE_LOOP, "agreement"):
            made = self._new_group(self.timeout, ranks=list(key.ranks), backend=key.backend, pg_options=options)
            group = self._covered(made)
            if key.backend == "nccl" and self.rank in key.ranks:
                connect(group, self.device)
        return group

    def _new_group(self, timeout: datetime.timedelta, *, backend: str = "gloo", **options: Any) -> Any:
        with meeting_under(self.run):
            device = None if backend == "gloo" else self.device
            return dist.new_group(timeout=timeout, backend=backend, device_id=device, **options)

    def carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Returns the group of all ranks that moves a tensor."""
        return carrier_of(tensor, self.everyone, self.agreements)

    def _covered(self, group: Any) -> dist.ProcessGroup:
        """Takes a group whose calls are to be freed when a rank has failed; one that this rank is in."""
        if self.watch is not None and isinstance(group, dist.ProcessGroup):
            self.watch.cover(group)
        return group  # type: ignore[no-any-return]

    def _forget(self, group: dist.ProcessGroup) -> None:
        """Takes back what ``_covered`` did."""
        if self.watch is not None:
            self.watch.uncover(group)

    def background_group(self) -> dist.ProcessGroup:
        """Returns the group of all ranks, on CPUs, in which checkpoints are written; all ranks have to ask for it."""
        if self._background is None:
            with self.progress.waiting(THE_LOOP, "agreement"):
                self._background = self._covered(self._new_group(self._patient))
        return self._background

    def tell(self, value: Any) -> list[Any]:
        """Returns what each rank told: data that JSON could hold."""
        found: list[Any] = [None] * self.size
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.all_gather_object(found, value, group=self._control)
        return found

    def first_says(self, value: Any) -> Any:
        """Returns what rank 0 told."""
        found = [value]
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast_object_list(found, src=0, group=self._control)
        return found[0]

    def check_devices(self, mine: tuple[str, str]) -> None:
        """Raises BackendUnavailableError, on all ranks, if some are on GPUs and others are not, or two are on one.

        Args:
            mine: This rank's kind of device, and a text that no other device has; empty for none in particular.
        """
        told = [tuple(each) for each in self.tell(mine)]
        others = [f"rank {rank} on {kind}" for rank, (kind, _) in enumerate(told) if kind != told[0][0]]
        if others:
            raise BackendUnavailableError(
                "all ranks have to be on GPUs, or none; move the model to cuda:$LOCAL_RANK on every rank",
                found="; ".join(others),
                needed=f"{told[0][0]} as on rank 0",
            )
        first = {name: rank for rank, (_, name) in reversed(list(enumerate(told)))}
        shared = [
            f"rank {rank} is on that of rank {first[n]}" for rank, (_, n) in enumerate(told) if n and first[n] != rank
        ]
        if shared:
            raise BackendUnavailableError(
                "each rank needs a GPU of its own; move the model to cuda:$LOCAL_RANK on every rank",
                found="; ".join(shared),
                needed=f"{self.size} GPUs",
            )

    def check_alike(self, facts: RankFacts) -> None:
        """Raises BackendUnavailableError, on all ranks, naming those that differ from rank 0 and in what."""
        told: list[dict[str, Any]] = self.tell(asdict(facts))
        inputs = [theirs.pop("inputs") for theirs in told]
        differing = [
            f"rank {rank} has {name}={theirs[name]!r}"
            for rank, theirs in enumerate(told)
            for name in told[0]
            if theirs[name] != told[0][name]
        ]
        if differing:
            raise BackendUnavailableError(
                "the ranks are not alike; start them with the same model, versions and devices",
                found="; ".join(differing),
                needed="; ".join(f"{name}={value!r}" for name, value in told[0].items()) + " as on rank 0",
            )
        rank = next((rank for rank, theirs in enumerate(inputs) if theirs != inputs[0]), None)
        if rank is not None:
            found, needed = next((a, b) for a, b in zip(inputs[rank], inputs[0], strict=True) if a != b)
            raise BackendUnavailableError(
                "the ranks' samples are of different shapes or types; give each rank a sample with the same number of "
                "rows, padded to one length",
                found=f"{found} on rank {rank}",
                needed=f"{needed} as on rank 0",
            )

    def check_same_plan(self, fingerprint: str, num_devices: int) -> None:
        """Raises InvalidPlanError, on all ranks, unless all have one plan, for as many devices as there are ranks."""
        told = self.tell((fingerprint, num_devices))
        if len(set(told)) > 1:
            each = "; ".join(f"rank {rank}: {found}" for rank, (found, _) in enumerate(told))
            raise InvalidPlanError(f"the ranks were given different plans ({each}); give all of them the same file")
        if num_devices != self.size:
            raise InvalidPlanError(
                f"the plan is for {num_devices} devices and there are {self.size} ranks; start {num_devices} ranks, "
                f"or plan again: mosaic plan --gpus {self.size}"
            )

    def together(self, work: Callable[[], _Made]) -> _Made:
        """Returns what this rank's work makes; if any rank's fails, all raise: its own error there, or who failed."""
        made, error = None, None
        try:
            made = work()
        except Exception as failure:  # of any kind: all ranks have to hear of it
            error = failure
        self.all_or_none(error)
        return made  # type: ignore[return-value]  # there is no error

    def all_or_none(self, error: BaseException | None) -> None:
        """Raises on every rank if one of them failed: its own error there, one that names it elsewhere."""
        told = self.tell(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if failed:
            raise MosaicError("; ".join(failed))


def _has_nccl() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _gpu_of(device: torch.device, me: Identity) -> str:
    """Returns a text that names a GPU among all machines; empty where torch does not tell, or there is none."""
    if device.type != "cuda":
        return ""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if found is None else f"{me.host} {found}"


def _have_own_gpus(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Returns whether each rank is on a GPU of its own, so that NCCL can connect them; every rank has to call it."""
    store.set(f"device/{rank}", _gpu_of(device, Identity.of_this_process(rank, size)))
    if device.type != "cuda":
        return False
    gpus = [store.get(f"device/{other}").decode() for other in range(size)]
    return all(gpus) and len(set(gpus)) == size


def _holder_of(ranks: Sequence[Identity], environ: Mapping[str, str] = os.environ) -> Identity | None:
    """Returns the rank that holds the default group's store: none, where torchrun's agent does."""
    return None if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ranks[0]
