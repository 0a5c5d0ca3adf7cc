"""The ranks of a run: their groups, their collectives of small values, and checks that they are alike."""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from mosaic.checkpoint.ranks import Ranks
from mosaic.device import Device
from mosaic.engine.options import RankSettings
from mosaic.errors import BackendUnavailableError, InvalidPlanError, MosaicError
from mosaic.graph import ModuleGraph
from mosaic.ranks.world.failures import CancelToken, Heartbeats
from mosaic.ranks.world.groups import (
    GroupKey,
    GroupLoan,
    carrier_of,
    connect,
    group_options,
    no_splits,
    num_nccl_collectives,
    set_launch_order,
)
from mosaic.ranks.world.progress import THE_LOOP, RankProgress
from mosaic.ranks.world.rendezvous import CPU, open_store, rendezvous

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 1800.0
"""Seconds that ranks wait while one of them profiles and solves."""


def facts_of(device: Device, graph: ModuleGraph) -> dict[str, Any]:
    """Returns what has to be the same on all ranks, by name; ``inputs`` are those of the sample's step."""
    from mosaic import __version__

    has_nccl = device.kind == "cuda" and dist.is_nccl_available() and torch.cuda.is_available()
    shapeless = replace(graph, modules=tuple(replace(module, inputs=()) for module in graph.modules))
    return {
        "mosaic": __version__,
        "torch": torch.__version__,
        "device": device.name,
        "num_slots": device.num_slots,
        "sms_per_slot": device.sms_per_slot,
        "graph": shapeless.fingerprint,
        "inputs": [f"{module.name!r} gets {', '.join(module.inputs)}" for module in graph.modules],
        "remainder_sms": device.remainder_sms,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
    }


class World(Ranks):
    """All ranks, over torch.distributed.

    Args:
        timeout_s: How long a collective may take before it is an error, and how long ranks may take to come.
        watch: Settings of the heartbeats; None for no heartbeats.
        device: Where this rank's tensors are; by default the CPU.

    Attributes:
        rank: This one.
        size: How many there are.
        me: This rank's process.
        everyone: A group of all ranks that moves tensors of ``device``.
        agreements: A group of all ranks that moves tensors in host memory.
        device: Where this rank's tensors are.
        run: A text that all ranks have in common, and no other run has.
        progress: Where this rank is.
        store: Shared by all ranks of this world, and used by no other one.
        max_ctas: SMs that collectives of groups made from now on may take; None for as many as they like.

    Raises:
        BackendUnavailableError: There is no process group, or some rank has not come; names those. Or some are on GPUs
            and others are not, or two are on one; names those. Or NCCL does not keep the order of launches.
    """

    def __init__(
        self,
        *,
        timeout_s: float = RankSettings().timeout_s,
        watch: RankSettings | None = None,
        device: torch.device = CPU,
    ) -> None:
        if not dist.is_initialized():
            raise BackendUnavailableError(
                "there is no process group", found="no torch.distributed", needed="a start by torchrun"
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.progress = RankProgress()
        self.max_ctas: int | None = None
        self.device = device
        if device.type == "cuda" and self.size > 1:
            set_launch_order(os.environ, num_collectives=num_nccl_collectives())
        # A connection of its own: calls that wait hold up no others.
        store = dist.group.WORLD.get_group_store().clone()  # type: ignore[union-attr]
        members, self.store = rendezvous(store, self.rank, self.size, timeout_s=timeout_s, device=device)
        self.me = members[self.rank]
        self._spare: defaultdict[GroupKey, GroupLoan] = defaultdict(GroupLoan)
        self._loan: GroupLoan | None = None
        self._grace_s = (watch or RankSettings()).grace_s
        self._heartbeats: Heartbeats | None = None
        if watch is not None and self.size > 1:
            self._heartbeats = Heartbeats(members, self.store, self.rank, self.progress, watch)
        self._timeout = timedelta(seconds=timeout_s)
        # Rank 0 may profile for minutes while the others wait for its plan.
        self._patience = timedelta(seconds=max(timeout_s, PATIENCE_S))
        self._background: dist.ProcessGroup | None = None
        with self.opening():
            self._control = self._new_group(self._patience)
            self.run: str = self.broadcast(uuid.uuid4().hex)
            self.everyone = self.group(range(self.size))
            self.agreements = self.group(range(self.size), backend="gloo") if device.type == "cuda" else self.everyone
            if self._heartbeats is not None:
                self._heartbeats.groups.append(dist.group.WORLD)  # type: ignore[arg-type]

    @classmethod
    def join(
        cls,
        device: torch.device,
        *,
        timeout_s: float = RankSettings().timeout_s,
        watch: RankSettings | None = None,
    ) -> Self:
        """Returns the ranks that torchrun started; makes the default process group unless the loop has made it."""
        if not dist.is_initialized():
            missing = [name for name in _VARIABLES if not os.environ.get(name)]
            if missing:
                raise BackendUnavailableError(
                    f"this process was started as one of several ranks, but {', '.join(missing)} not set; start it by "
                    "torchrun, or unset WORLD_SIZE",
                    found=f"WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
                    needed=", ".join(_VARIABLES),
                )
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            _, store = rendezvous(open_store(rank, timeout_s), rank, size, timeout_s=timeout_s, device=device)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("default_pg", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        return cls(timeout_s=timeout_s, watch=watch, device=device)

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
            if self._heartbeats is not None:
                self._heartbeats.declare_own(error)
            self.close()
            raise

    def close(self) -> None:
        """Ends the heartbeats; the others read that this rank is done."""
        if self._heartbeats is not None:
            self._heartbeats.stop()

    # Groups.

    def group(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Returns a communicator that nothing else uses, by default one that moves tensors of this rank's device.

        All ranks have to ask for the same ones in the same order.
        """
        key = GroupKey(tuple(ranks), backend or ("nccl" if self.device.type == "cuda" else "gloo"), self.max_ctas)
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
            if self._heartbeats is not None:
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

    def cancel_token(self, name: str, groups: list[dist.ProcessGroup]) -> CancelToken:
        """Returns what lets any rank cancel the work of a block; see ``CancelToken``."""
        tokens = self._heartbeats.tokens if self._heartbeats is not None else []
        return CancelToken(
            self.store, self.rank, self.progress, tokens, grace_s=self._grace_s, name=name, groups=groups
        )

    def _connected(self, key: GroupKey) -> Any:
        """Makes a communicator and warms it up."""
        options = group_options(key.backend, key.max_ctas)
        with self.progress.waiting(THE_LOOP, "agreement"):
            group = self._new_group(self._timeout, ranks=list(key.ranks), backend=key.backend, pg_options=options)
            if key.backend == "nccl" and self.rank in key.ranks:
                connect(group, self.device)
        return group

    def _new_group(self, timeout: timedelta, *, backend: str = "gloo", **options: Any) -> Any:
        """Makes a group, which is aborted when this rank ends with an error."""
        with no_splits():
            device = None if backend == "gloo" else self.device
            group = dist.new_group(timeout=timeout, backend=backend, device_id=device, **options)
        if self._heartbeats is not None and isinstance(group, dist.ProcessGroup):
            self._heartbeats.groups.append(group)
        return group

    # Small values.

    def all_gather(self, value: Any) -> list[Any]:
        """Returns each rank's value: data that JSON could hold."""
        values: list[Any] = [None] * self.size
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Returns the value of one rank."""
        values = [value]
        with self.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast_object_list(values, src=source, group=self._control)
        return values[0]

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
        inputs = [theirs.pop("inputs") for theirs in ranks]
        differing = [
            f"rank {rank} has {name}={value!r}"
            for rank, theirs in enumerate(ranks)
            for name, value in theirs.items()
            if value != ranks[0][name]
        ]
        if differing:
            raise BackendUnavailableError(
                "the ranks are not alike; start them with the same model, versions and devices",
                found="; ".join(differing),
                needed="; ".join(f"{name}={value!r}" for name, value in ranks[0].items()) + " as on rank 0",
            )
        for rank, theirs in enumerate(inputs):
            for input_here, input_there in zip(theirs, inputs[0], strict=True):
                if input_here != input_there:
                    raise BackendUnavailableError(
                        "the ranks' samples are of different shapes or types; give each rank a sample with the same "
                        "number of rows, padded to one length",
                        found=f"{input_here} on rank {rank}",
                        needed=f"{input_there} as on rank 0",
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
