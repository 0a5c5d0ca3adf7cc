"""Captured work on the CPU: operators are noted while they run, undone at the end, and run again by a replay.

Rules of CUDA and torch that are kept, each with the words that it is from where it is checked: what a capture refuses,
how it ends, whose memory it uses, what that holds when, and where its random numbers come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from fake_streams.clocks import Launch
from fake_streams.memory import RaceError

if TYPE_CHECKING:
    from fake_streams.events import FakeStream
    from fake_streams.runtime import FakeStreams


class Pool:
    """Memory that captures share: what one of them lets go of, a later one is given again.

    "Sharing a mempool across graphs saves memory, and it's safe if you know you'll replay those graphs in the same
    order you captured them" (ATen/cuda/CUDAGraph.h), "and never concurrently" (torch's notes on CUDA graphs).
    """

    def __init__(self) -> None:
        self.blocks: dict[int, _Spot] = {}
        self._latest: Launch | None = None

    def unused(self) -> list[_Spot]:
        """Blocks that nothing holds any more but recordings, which know no more than the address."""
        return [spot for key, spot in self.blocks.items() if torch._C._storage_Use_Count(key) == 1]

    def replayed(self, launch: Launch) -> None:
        latest = self._latest
        if latest is not None and latest.stream != launch.stream and not launch.is_after(latest):
            raise RaceError(f"{launch} and {latest} replay graphs of one memory pool, and nothing orders them")
        self._latest = launch


@dataclass(frozen=True)
class _Spot:
    """A tensor by its address: it holds the storage, and so does nothing else that a graph knows."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Spot:
        return _Spot(tensor.untyped_storage(), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]

    def spoil(self) -> None:
        """Fills the whole block with what nobody wants to read; indices stay in bounds, since a CPU looks at them."""
        size = self.storage.nbytes() // self.dtype.itemsize
        whole = torch.empty(0, dtype=self.dtype).set_(self.storage, 0, (size,), (1,))  # type: ignore[call-overload]
        whole.fill_(torch.nan if self.dtype.is_floating_point or self.dtype.is_complex else 0)


class Recording:
    """One capture: its streams, its operators, and what has to be undone, since a capture runs nothing on CUDA."""

    def __init__(self, origin: FakeStream, pool: Pool) -> None:
        self.origin = origin
        self.pool = pool
        self.open = False
        self.draws = False
        self.streams: dict[int, FakeStream] = {}
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.written: set[int] = set()
        self.made: dict[int, _Spot] = {}
        self.left: list[_Spot] = []
        """Blocks of the pool that were free when it ended: it may have their addresses, and leave anything there."""
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_lost = False
        self._random: torch.Tensor | None = None

    def begin(self) -> None:
        if self.origin.capture is not None:
            raise RuntimeError("the stream is capturing already")
        self.open = True
        self._random = torch.get_rng_state()
        self.join(self.origin)

    def end(self) -> None:
        self.open = False
        for stream in self.streams.values():
            stream.capture = None
        assert self._random is not None
        torch.set_rng_state(self._random)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for tensor, before in self._kept.values():
                tensor.copy_(before)
            for spot in self.made.values():  # nothing has run yet
                spot.spoil()
        self.pool.blocks |= self.made
        self.left = self.pool.unused()
        if self._is_lost:
            # cudaErrorStreamCaptureInvalidated
            raise RuntimeError("the capture sequence on the stream has been invalidated due to a previous error")
        for handle, stream in self.streams.items():
            if self.origin.clock.get(handle, 0) < stream.clock.get(handle, 0):
                # cudaErrorStreamCaptureUnjoined: "The capture sequence contains a fork that was not joined to the
                # primary stream."
                raise RuntimeError(f"stream {handle} forked from the capture and was not joined")

    def join(self, stream: FakeStream) -> None:
        if stream.capture not in (None, self):
            raise RuntimeError("the stream belongs to another capture")
        stream.capture = self
        self.streams[stream.handle] = stream

    def refuse(self, what: str) -> None:
        """cudaErrorStreamCaptureUnsupported: "The operation is not permitted when the stream is capturing."."""
        self._is_lost = True
        raise RuntimeError(f"{what} is not permitted while a stream is capturing")

    def before(self, func: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
        if self._is_lost:
            raise RuntimeError("the capture sequence on the stream has been invalidated due to a previous error")
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            self.refuse(f"reading back what {func} needs")
        if kwargs.get("generator") is not None:
            # torch: a generator that was not registered with the graph has no state on the device
            self.refuse("a generator that is not registered with the graph")
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in written:
            key = tensor.untyped_storage()._cdata
            self.written.add(key)
            if key not in self.made and key not in self._kept:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
                self._kept[key] = (whole, whole.clone())

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = {t.untyped_storage()._cdata: _Spot.of(t) for t in _tensors(result)}
        made = {key: spot for key, spot in made.items() if key not in given}
        self.made |= made
        self.written |= made.keys()
        allocates = func.name().startswith(("aten::empty", "aten::new_empty"))
        if torch.Tag.inplace_view not in func.tags and not allocates:  # they launch nothing, or change noted shapes
            self.operators.append((func, *pytree.tree_map_only(torch.Tensor, _Spot.of, (args, kwargs, result))))


class FakeGraph:
    """A graph: replays its operators into the memory in which they were captured."""

    def __init__(self, runtime: FakeStreams) -> None:
        self._runtime = runtime
        self._recording: Recording | None = None
        self._generator = torch.zeros(2)
        """Seed and offset, on the device: "Each (generator, capture_id) pair gets its own CUDAGeneratorCaptureState"
        (ATen/cuda/CUDAGeneratorImpl.h of torch 2.13)."""
        self.num_replays = 0

    @property
    def streams(self) -> tuple[int, ...]:
        """Handles of the streams whose contexts its kernels run in."""
        return () if self._recording is None else tuple(self._recording.streams)

    def take(self, recording: Recording) -> None:
        self._recording = recording

    def replay(self) -> None:
        recording = self._recording
        if recording is None:
            raise RuntimeError("nothing was captured in this graph")
        self.num_replays += 1
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C._DisableTorchDispatch():
            for spot in recording.made.values():
                spot.spoil()
            touched: dict[int, torch.Tensor] = {}
            for operator in recording.operators:
                func, args, kwargs, result = pytree.tree_map_only(_Spot, _Spot.tensor, operator)
                again = func(*args, **kwargs)
                for before, now in zip(_tensors(result), _tensors(again), strict=True):
                    if before.untyped_storage()._cdata != now.untyped_storage()._cdata:
                        before.copy_(now)
                touched |= {t.untyped_storage()._cdata: t for t in _tensors((args, kwargs, result))}
            for spot in recording.left:
                spot.spoil()
        reads = [tensor for key, tensor in touched.items() if key not in recording.written]
        if recording.draws:
            # "When the graph reruns, the logic that reruns it first fill_s the initial offset tensor with this device's
            # CUDA generator's current offset." (the same header)
            reads.append(self._generator if self._runtime.generator is None else self._runtime.generator)
            self._runtime.launch("fill the generator's state", [], [reads[-1]])
        self._runtime.launch(
            "graph replay", reads, [tensor for key, tensor in touched.items() if key in recording.written]
        )
        recording.pool.replayed(self._runtime.launches[-1])

    def reset(self) -> None:
        self._recording = None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
