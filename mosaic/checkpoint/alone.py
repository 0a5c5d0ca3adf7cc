"""Saving and loading by one process alone, with torch's own checkpoints.

The public ``torch.distributed.checkpoint.load`` and ``async_save`` warn of a process without others, each time, the
latter from a thread of its own. Filters of warnings belong to the whole process, and to its user; so what is called
here is what these functions call, which does not warn.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


def save_alone(tensors: Mapping[str, Mapping[str, torch.Tensor]], writer: StorageWriter) -> Future[Any]:
    """Writes tensors in a thread of its own; they must not change meanwhile."""
    with_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = with_thread.submit(_save_state_dict, dict(tensors), writer, no_dist=True)
    with_thread.shutdown(wait=False)  # the thread ends with its work, and the process waits for it
    return future


def load_alone(into: dict[str, torch.Tensor], reader: StorageReader, planner: LoadPlanner) -> None:
    """Reads into tensors.

    Raises:
        CheckpointException: They could not be read.
    """
    _load_state_dict(into, reader, no_dist=True, planner=planner)
