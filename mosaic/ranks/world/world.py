"""The ranks of a run: their groups, their collectives of small values, and checks that they are alike."""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mosaic.checkpoint.checkpointer import Ranks, gather_objects
from mosaic.device import Device
from mosaic.engine.options import RankSettings
from mosaic.errors import BackendUnavailableError, InvalidPlanError, MosaicError
from mosaic.graph import ModuleGraph
from mosaic.ranks.world.failures import CancelToken, Heartbeats, Member
from mosaic.ranks.world.groups import (
    GroupKey,
    GroupLoan,
    carrier_of,
    connect,
    no_splits,
    num_nccl_collectives,
    set_launch_order,
)
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

# A forked process, such as a data loader's worker, would hang in the end of a communicator that it frees from a cycle.
os.register_at_fork(after_in_child=gc.freeze)
CPU = torch.device("cpu")
PATIENCE_S = 1800.0
"""Seconds that ranks wait while one of them profiles and solves."""


def rendezvous(
    store: Store, rank: int, size: int, *, timeout_s: float, device: torch.device = CPU
) -> tuple[tuple[Member, ...], Store]:
    """Waits until all ranks have written themselves to the store.

    Returns:
        All ranks, and a part of the store that no other rendezvous uses: none of an earlier start of torchrun's, whose
        addresses ranks would read, and none of an earlier world.

    Raises:
        BackendUnavailableError: Some ranks have not come, or some are on GPUs and others are not; names them.
    """
    attempt = PrefixStore(f"mosaic/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    own = PrefixStore(f"{(attempt.add('arrivals', 1) - 1) // size}", attempt)
    own.set(f"member/{rank}", json.dumps([rank, socket.gethostname(), os.getpid(), device.type]))
    keys = [f"member/{other}" for other in range(size)]
    try:
        own.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [str(other) for other, key in enumerate(keys) if not own.check([key])]
        raise BackendUnavailableError(
            f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(absent)} "
            f"{'has' if len(absent) == 1 else 'have'} not come after {timeout_s:g} s; read what these "
            "processes printed, or raise timeout_s if they only start slowly",
            found=f"{size - len(absent)} of {size} ranks",
            needed="all of them to call mosaic.colocate",
        ) from error
    members = tuple(Member(*json.loads(own.get(key))) for key in keys)
    if unlike := [f"rank {member.rank} on {member.kind}" for member in members if member.kind != members[0].kind]:
        raise BackendUnavailableError(
            "all ranks have to be on GPUs, or none; move the model to cuda:$LOCAL_RANK on every rank",
            found="; ".join(unlike),
            needed=f"{members[0].kind} as on rank 0",
        )
    return members, own


def init_process_group(device: torch.device, timeout_s: float = RankSettings().timeout_s) -> None:
    """Makes the default process group of torchrun's ranks; names ranks that do not come, unlike torch."""
    if "RANK" not in os.environ:
        raise BackendUnavailableError(
            "this process is none of several ranks; start it by torchrun --nproc-per-node N FILE",
            found="no RANK in the environment",
            needed="what torchrun sets",
        )
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    _, store = rendezvous(store, rank, size, timeout_s=timeout_s, device=device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def facts_of(device: Device, graph: ModuleGraph) -> dict[str, Any]:
    """Returns what has to be the same on all ranks, by name; inputs are those of the sample's step."""
    from mosaic import __version__

    has_nccl = device.kind == "cuda" and dist.is_nccl_available() and torch.cuda.is_available()
    shapeless = replace(graph, modules=tuple(replace(module, inputs=()) for module in graph.modules))
    return {
        "mosaic": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "graph": shapeless.fingerprint,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        **{f"inputs of {module.name!r}": ", ".join(module.inputs) for module in graph.modules},
    }


class World(Ranks):
    """All ranks, over torch.distributed.

    Args:
        device: Where this rank's tensors are; by default the CPU.
        settings: How long ranks wait for each other, and how often they report their places.

    Attributes:
        me: This rank's process.
        everyone: A group of all ranks that moves tensors of ``device``.
        agreements: A group of all ranks that moves tensors in host memory.
        run: A text that all ranks have in common, and no other run has.

    Raises:
        BackendUnavailableError: Some ranks have not come, or some are on GPUs and others are not; names them. Or NCCL
            does not keep the order of launches.
    """

    def __init__(self, device: torch.device = CPU, settings: RankSettings | None = None) -> None:
        settings = settings or RankSettings()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.progress = RankProgress()
        self.device = device
        if device.type == "cuda" and self.size > 1:
            set_launch_order(os.environ, num_collectives=num_nccl_collectives())
        # A connection of its own: calls that wait hold up no others.
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        members, store = rendezvous(store, self.rank, self.size, timeout_s=settings.timeout_s, device=device)
        self.me = members[self.rank]
        self._spare: defaultdict[GroupKey, GroupLoan] = defaultdict(GroupLoan)
        self._loan: GroupLoan | None = None
        # Communicators in cycles have threads that free tensors, which aborts the process once the interpreter is gone.
        atexit.unregister(gc.collect)
        atexit.register(gc.collect)
        self._heartbeats = Heartbeats(members, store, self.rank, self.progress, settings)
        self._timeout = timedelta(seconds=settings.timeout_s)
        # Rank 0 may profile for minutes while the others wait for its plan.
        self._patience = timedelta(seconds=max(settings.timeout_s, PATIENCE_S))
        self._background: dist.ProcessGroup | None = None
        with self.opening():
            self._control = self._new_group(self._patience)
            self.run: str = self.broadcast(uuid.uuid4().hex)
            self.everyone = self.group(range(self.size))
            self.agreements = self.group(range(self.size), backend="gloo") if device.type == "cuda" else self.everyone
            self._heartbeats.groups.append(dist.group.WORLD)  # type: ignore[arg-type]

    @classmethod
    def join(cls, device: torch.device, settings: RankSettings | None = None) -> Self:
        """Returns the ranks that torchrun started; makes the default process group unless the loop has made it."""
        if not dist.is_initialized():
            init_process_group(device, (settings or RankSettings()).timeout_s)
        return cls(device, settings)

    @staticmethod
    def is_there() -> bool:
        """Returns whether this process is one of several ranks, of a process group or of a launcher's."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size() > 1
        return int(os.environ.get("WORLD_SIZE") or 1) > 1

    @contextmanager
    def opening(self) -> Iterator[None]:
        """A block that ends with all ranks at work; if it fails here, the others do not wait for this rank."""
        try:
            yield
        except BaseException as error:
            self._heartbeats.declare_own(error)
            self.close()
            raise

    def close(self) -> None:
        """Ends the heartbeats; the others read that this rank is done."""
        self._heartbeats.stop()

    # Groups.

    def group(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Returns a communicator that nothing else uses; all ranks request the same ones in the same order."""
        key = GroupKey(tuple(ranks), backend or ("nccl" if self.device.type == "cuda" else "gloo"))
        spare = self._spare[key]
        group = spare.pop(0)[1] if spare else self._connected(key)
        if self._loan is not None:
            self._loan.append((key, group))
        return group  # type: ignore[no-any-return]

    @contextmanager
    def lending(self) -> Iterator[GroupLoan]:
        """A block whose communicators are listed, to be given back or destroyed; the innermost block's list counts."""
        before, self._loan = self._loan, (loan := GroupLoan())
        try:
            yield loan
        finally:
            self._loan = before

    def give_back(self, loan: GroupLoan) -> None:
        """Keeps communicators on which nothing is under way for later requests."""
        for key, group in loan:
            self._spare[key].append((key, group))
        loan.clear()

    def destroy(self, loan: GroupLoan) -> None:
        """Ends communicators; those with aborted calls cannot be used again."""
        for group in loan.groups:
            self._heartbeats.groups = [other for other in self._heartbeats.groups if other is not group]
            dist.destroy_process_group(group)
        loan.clear()

    def destroy_spare(self) -> None:
        for loan in self._spare.values():
            self.destroy(loan)

    def background_group(self) -> dist.ProcessGroup:
        """Returns the group of all ranks, on CPUs, in which checkpoints are written; all ranks have to request it."""
        if self._background is None:
            with self.progress.waiting(THE_LOOP, "agreement"):
                self._background = self._new_group(self._patience)
        return self._background

    def carrier_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Returns the group of all ranks that moves a tensor."""
        return carrier_of(tensor, self.everyone, self.agreements)

    def share_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies rank 0's values into the tensors of all ranks."""
        for tensor in tensors:
            with self.progress.waiting(THE_LOOP, "agreement"):
                dist.broadcast(tensor.detach(), src=0, group=self.carrier_of(tensor))

    def cancel_token(self, name: str, groups: list[dist.ProcessGroup]) -> CancelToken:
        return CancelToken(self._heartbeats, name, groups)

    def _connected(self, key: GroupKey) -> Any:
        """Makes a communicator and warms it up."""
        with self.progress.waiting(THE_LOOP, "agreement"):
            group = self._new_group(self._timeout, ranks=list(key.ranks), backend=key.backend)
            if key.backend == "nccl" and self.rank in key.ranks:
                connect(group, self.device)
        return group

    def _new_group(self, timeout: timedelta, *, backend: str = "gloo", **options: Any) -> Any:
        """Makes a group, which is aborted when this rank ends with an error."""
        with no_splits():
            device = None if backend == "gloo" else self.device
            group = dist.new_group(timeout=timeout, backend=backend, device_id=device, **options)
        if isinstance(group, dist.ProcessGroup):
            self._heartbeats.groups.append(group)
        return group

    # Small values.

    def all_gather(self, value: Any) -> list[Any]:
        """Returns each rank's value: data that JSON could hold."""
        with self.progress.waiting(THE_LOOP, "agreement"):
            return gather_objects(self._control, value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns the value of one rank."""
        values = [value]
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast_object_list(values, src=source, group=self._control)
        return values[0]

    def copy_of(self, tensor: torch.Tensor, source: int, device: torch.device | None = None) -> torch.Tensor:
        """Returns a copy of a tensor with its values on one rank; every rank calls it, those without values, too."""
        copy = torch.empty_like(tensor, device=device or self.device) if tensor.is_meta else tensor.detach().clone()
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast(copy, src=source, group=self.carrier_of(copy))
        return copy

    def raise_if_any_failed(self, error: BaseException | None) -> None:
        texts = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise MosaicError("; ".join(failed))

    # Checks, which raise on all ranks alike.

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Raises BackendUnavailableError that names ranks which differ from rank 0, and in what."""
        ranks: list[dict[str, Any]] = self.all_gather(dict(facts))
        for name, needed in ranks[0].items():
            values = enumerate(theirs.get(name) for theirs in ranks)
            if differing := [f"rank {rank} has {name}={value!r}" for rank, value in values if value != needed]:
                raise BackendUnavailableError(
                    "the ranks are not alike; start them with the same model, versions and devices, and give each a "
                    "sample with the same number of rows, padded to one length",
                    found="; ".join(differing),
                    needed=f"{name}={needed!r} as on rank 0",
                )

    def check_same_plan(self, fingerprint: str, num_devices: int) -> None:
        plans = self.all_gather((fingerprint, num_devices))
        if len(set(plans)) > 1:
            each = "; ".join(f"rank {rank}: {plan}" for rank, (plan, _) in enumerate(plans))
            raise InvalidPlanError(f"the ranks were given different plans ({each}); give all of them the same file")
        if num_devices != self.size:
            raise InvalidPlanError(
                f"the plan is for {num_devices} devices and there are {self.size} ranks; start {num_devices} ranks, "
                f"or plan again: mosaic plan --gpus {self.size}"
            )
