"""The GPU of a rank, and its communicators: how they are made, which one carries a tensor, and which ones are spare."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from mosaic.backends.base import Backend
from mosaic.backends.host.backend import HostBackend
from mosaic.backends.table import default_backend
from mosaic.errors import BackendUnavailableError
from mosaic.hardware.find import available_cores

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""Variable of NCCL; 1 starts collectives of different communicators in the order in which they were launched."""


# The device of a rank.


def own_gpu() -> int:
    """Returns the number of this rank's GPU: ``LOCAL_RANK``, or 0 where the launcher lets it see that one alone."""
    visible, rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= visible != 1:
        raise BackendUnavailableError(
            f"there is no GPU for local rank {rank}; start as many ranks as there are GPUs",
            found=f"{visible} GPUs",
            needed=f"{rank + 1} or more",
        )
    return min(rank, visible - 1)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first of a model's tensors that is on a GPU; the CPU where none is."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{model!r} is not a model; pass an nn.Module")
    devices = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def cores_of_rank(rank: int | None = None, ranks: int | None = None) -> tuple[int, ...]:
    """Returns this rank's share of the cores of its machine: at least one, which ranks may then have in common."""
    cores = available_cores()
    rank = int(os.environ.get("LOCAL_RANK", "0")) if rank is None else rank
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    each = max(1, len(cores) // ranks)
    start = (rank * each) % len(cores)
    return cores[start : start + each]


def backend_of(device: torch.device) -> Backend:
    """Returns the backend of this rank: its own GPU, or its share of the host's cores."""
    if device.type != "cuda":
        return HostBackend(cores=cores_of_rank())
    backend = default_backend(torch.device("cuda", own_gpu()))
    torch.cuda.set_device(backend.torch_device)
    return backend


def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


# Communicators.


class GroupKey(NamedTuple):
    """The properties in which exchangeable communicators agree."""

    ranks: tuple[int, ...]
    backend: str


class GroupLoan(list[tuple[GroupKey, Any]]):
    """The communicators of one user in the order of its requests, which is the same on all ranks."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for _, group in self if isinstance(group, dist.ProcessGroup)]


@contextmanager
def no_splits() -> Iterator[None]:
    """A block whose new groups are not splits of the default group.

    Where the default group is bound to a device, torch has ranks outside of a new group split NCCL's communicator,
    which waits for all ranks; those inside of a gloo group never do (``_new_process_group_helper``).
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def set_launch_order(environ: MutableMapping[str, str], *, num_collectives: int | None) -> None:
    """Has NCCL start collectives of different communicators in the order in which this process launches them.

    NCCL reads the variable once in a process, at its first collective (src/enqueue.cc). Without that order, collectives
    of two modules may wait for each other forever (``mosaic.ranks.calls.streams``).
    """
    value = environ.get(LAUNCH_ORDER)
    if value == "1":
        return
    if value is None and num_collectives == 0:
        environ[LAUNCH_ORDER] = "1"
        return
    present = f"{LAUNCH_ORDER}={value}"
    if value is None:
        many = "an unknown number of" if num_collectives is None else str(num_collectives)
        present = f"{many} collectives of NCCL before mosaic.colocate, without {LAUNCH_ORDER}"
    raise BackendUnavailableError(
        "collectives of several modules could wait for each other: NCCL reads the order of launches once, at a "
        f"process's first collective; run `export {LAUNCH_ORDER}=1` before the ranks start",
        found=present,
        needed=f"{LAUNCH_ORDER}=1 from the start of the process, or no collective before mosaic.colocate",
    )


def num_nccl_collectives() -> int | None:
    """Returns how many collectives NCCL's groups of this process have run; None where a group does not count them."""
    count = 0
    for group in distributed_c10d._world.pg_map:
        if "nccl" in dist.get_backend_config(group):
            try:
                backend: Any = group._get_backend(torch.device("cuda"))
                count += backend._get_sequence_number_for_group()
            except (AttributeError, RuntimeError):
                return None
    return count


def peers_share_a_communicator(group: dist.ProcessGroup) -> bool:
    """Returns whether ``batch_isend_irecv`` sends to all peers of a group through one communicator, in one queue."""
    return bool(dist.get_backend(group) == dist.Backend.NCCL)


def carrier_of(tensor: torch.Tensor, group: dist.ProcessGroup, control: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns which of two groups of the same ranks moves a tensor: NCCL's take none that is in host memory."""
    is_nccl = dist.get_backend(group) == dist.Backend.NCCL
    return control if is_nccl and tensor.device.type == "cpu" else group


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Has an NCCL communicator make its connections now, which its first collective and exchange do otherwise."""
    dist.all_reduce(torch.ones(1, device=device), group=group)
    rows = torch.ones(dist.get_world_size(group), device=device)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
    torch.cuda.synchronize(device)
