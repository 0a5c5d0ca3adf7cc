"""The ranks of a run: who they are, whether they are alike, and telling all of them what one has decided."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from mosaic.device import Device
from mosaic.errors import BackendUnavailableError, InvalidPlanError, MosaicError

TIMEOUT_S = 60.0
"""How long a rank waits for another one in a step before it gives up, by default."""
PATIENCE_S = 1800.0
"""How long ranks wait while one of them profiles and solves."""


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
    """Fingerprint of the modules that the rank found in its model."""

    @staticmethod
    def of(device: Device, graph: str) -> RankFacts:
        """Reads them off this process."""
        from mosaic import __version__

        return RankFacts(
            mosaic=__version__,
            torch=torch.__version__,
            device=device.name,
            num_slots=device.num_slots,
            sms_per_slot=device.sms_per_slot,
            graph=graph,
        )


class World:
    """All ranks, over torch.distributed.

    Args:
        timeout_s: How long an exchange may take before it is an error.

    Attributes:
        rank: This one.
        size: How many there are.
        everyone: A group of all of them.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        if not dist.is_initialized():
            raise BackendUnavailableError(
                "there is no process group", found="no torch.distributed", needed="a start by torchrun"
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.everyone = self.group(range(self.size))
        # Rank 0 may profile for minutes while the others wait for its plan.
        patient = max(self.timeout, datetime.timedelta(seconds=PATIENCE_S))
        self._patient = patient
        self._control = dist.new_group(timeout=patient, backend="gloo")
        self._background: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, device: torch.device, *, timeout_s: float = TIMEOUT_S) -> Self:
        """Returns the ranks that torchrun started; makes the default process group unless the loop has made it."""
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        return cls(timeout_s=timeout_s)

    @staticmethod
    def is_there() -> bool:
        """Whether this process is one of several ranks."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size() > 1
        return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ

    def group(self, ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
        """Makes a communicator; all ranks have to ask for the same ones in the same order."""
        made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
        return made

    def background_group(self) -> dist.ProcessGroup:
        """Returns the group of all ranks, on CPUs, in which checkpoints are written; all ranks have to ask for it."""
        if self._background is None:
            self._background = dist.new_group(timeout=self._patient, backend="gloo")
        return self._background

    def tell(self, value: Any) -> list[Any]:
        """Returns what each rank told: data that JSON could hold."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def first_says(self, value: Any) -> Any:
        """Returns what rank 0 told."""
        found = [value]
        dist.broadcast_object_list(found, src=0, group=self._control)
        return found[0]

    def check_alike(self, facts: RankFacts) -> None:
        """Raises BackendUnavailableError, on all ranks, naming those that differ from rank 0 and in what."""
        told: list[Mapping[str, Any]] = self.tell(asdict(facts))
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

    def all_or_none(self, error: BaseException | None) -> None:
        """Raises on every rank if one of them failed: its own error there, one that names it elsewhere."""
        told = self.tell(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
        if failed:
            raise MosaicError("; ".join(failed))
