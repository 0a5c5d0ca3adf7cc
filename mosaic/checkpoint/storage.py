"""The files under torch.distributed.checkpoint: safetensors for tensors, JSON for the rest, and no pickle.

torch's own ``FileSystemWriter`` keeps what it knows of the tensors in a pickle, ``.metadata``, and its reader loads it
without restriction. Here the same facts stand in ``manifest.json``, under checksums. The tensors' files are what
torch's ``HuggingFaceStorageReader`` reads, so that a checkpoint is read without Mosaic, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mosaic.checkpoint.disk import write_flushed
from mosaic.checkpoint.dtypes import bytes_of, dtype_of, entry_of
from mosaic.checkpoint.folder import Place
from mosaic.checkpoint.manifest import MANIFEST, STATE, FileEntry, Manifest, TensorEntry
from mosaic.checkpoint.safetensors_file import SUFFIX, Entry, write_tensors
from mosaic.errors import MosaicError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a rank says of a tensor that it wrote."""

    file: FileEntry
    """The file that it is in."""
    entry: Entry
    """What it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What rank 0 adds to the tensors."""

    manifest: Manifest
    """Without files and tensors."""
    state: str
    """JSON text of all that is no tensor."""
    keep: int
    """How many checkpoints stay."""


class Writer(StorageWriter):
    """Writes one safetensors file a rank, and on the coordinator what makes a checkpoint of them.

    Args:
        place: Where; the same for all ranks.
        contents: What else there is; on the coordinator only.
    """

    def __init__(self, place: Place, contents: Contents | None) -> None:
        self._place = place
        self._contents = contents
        self._name = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one is made for each checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the names of files come with the plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leaves it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank its file."""
        return [replace(plan, storage_data=f"rank-{rank:05d}{SUFFIX}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file; none where it has nothing to write."""
        if not self._place.aside.is_dir():
            raise MosaicError(f"rank 0 made {self._place.aside}, and it is not there on this rank")
        items: dict[str, WriteItem] = {item.index.fqn: item for item in plan.items}
        results = []
        if items:
            tensors: dict[str, Any] = {name: planner.resolve_data(item) for name, item in items.items()}
            entries = [entry_of(name, tensor) for name, tensor in tensors.items()]
            written = write_tensors(
                self._place.aside / plan.storage_data, entries, lambda entry: [bytes_of(tensors[entry.name])]
            )
            file = FileEntry(name=plan.storage_data, num_bytes=written.num_bytes, sha256=written.sha256)
            for entry in entries:
                index = items[entry.name].index
                stored = Stored(file=file, entry=entry)
                results.append(WriteResult(index=index, size_in_bytes=entry.num_bytes, storage_data=stored))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes what is no tensor and the manifest, and gives the whole its name."""
        assert self._contents is not None
        stored: list[Stored] = [result.storage_data for each in results for result in each]
        state = self._contents.state.encode()
        written = FileEntry(name=STATE, num_bytes=len(state), sha256=write_flushed(state, self._place.aside / STATE))
        files = {written.name: written, **{found.file.name: found.file for found in stored}}
        tensors = sorted(
            (
                TensorEntry(name=s.entry.name, dtype=s.entry.dtype, shape=s.entry.shape, file=s.file.name)
                for s in stored
            ),
            key=lambda tensor: tensor.name,
        )
        manifest = replace(self._contents.manifest, files=tuple(files.values()), tensors=tuple(tensors)).sealed()
        write_flushed(manifest.to_json().encode(), self._place.aside / MANIFEST)
        self._place.commit(self._contents.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return "://" not in str(checkpoint_id)


class Reader(StorageReader):
    """Reads what ``Writer`` wrote.

    Args:
        path: The checkpoint's folder.
        manifest: What is in it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one is made for each checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Says in torch's words what the manifest says."""
        described: dict[str, Any] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size([0] * len(tensor.shape)), sizes=torch.Size(tensor.shape))
                ],
            )
            for name, tensor in self._tensors.items()
        }
        places = {MetadataIndex(name, [0] * len(tensor.shape)): tensor.file for name, tensor in self._tensors.items()}
        return Metadata(state_dict_metadata=described, storage_data=places)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leaves it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leaves them as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies what was planned into the tensors that are there, one after the other."""
        from safetensors import safe_open

        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._tensors[item.storage_index.fqn].file, []).append(item)
        for name, items in by_file.items():
            with safe_open(self._path / name, framework="pt") as file:
                for item in items:
                    tensor = file.get_tensor(item.storage_index.fqn)
                    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dim, start, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a folder."""
        return "://" not in str(checkpoint_id)
