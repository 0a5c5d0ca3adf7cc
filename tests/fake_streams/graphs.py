"""Captured work on the CPU: operators are noted while they run, undone at the end, and run again by a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _preserve_versions
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from fake_streams.runtime import FakeStream, FakeStreams


class Recording:
    """One capture: its streams, its operators, and what has to be undone, since a capture runs nothing on CUDA."""

    def __init__(self, origin: FakeStream) -> None:
        self.origin = origin
        self.open = False
        self.streams: dict[int, FakeStream] = {}
        self.operators: list[tuple[int, Any, Any, Any, Any]] = []
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()
        self.written: set[int] = set()
        self._random: torch.Tensor | None = None

    def __enter__(self) -> Recording:
        if self.origin.capture is not None:
            raise RuntimeError("the stream is capturing already")
        self.open = True
        self._random = torch.get_rng_state()
        self.join(self.origin)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.open = False
        for stream in self.streams.values():
            stream.capture = None
        assert self._random is not None
        torch.set_rng_state(self._random)
        for tensor, before in self._kept.values():
            with torch.no_grad():
                tensor.copy_(before)
        if kind is None:
            for handle, stream in self.streams.items():
                if self.origin.clock.get(handle, 0) < stream.clock.get(handle, 0):
                    raise RuntimeError(f"stream {handle} forked from the capture and was not joined")

    def join(self, stream: FakeStream) -> None:
        if stream.capture not in (None, self):
            raise RuntimeError("the stream belongs to another capture")
        stream.capture = self
        self.streams[stream.handle] = stream

    def before(self, written: list[torch.Tensor]) -> None:
        for tensor in written:
            key = tensor.untyped_storage()._cdata
            self.written.add(key)
            if key not in self._made and key not in self._kept:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
                self._kept[key] = (whole, whole.clone())

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = {t.untyped_storage()._cdata for t in _tensors(result)} - given
        self._made |= made
        self.written |= made
        if torch.Tag.inplace_view not in func.tags:  # it launches nothing, and changes shapes that are noted here
            shapes = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs, result))
            self.operators.append((0, func, *shapes))


class FakeGraph:
    """A graph: replays its operators into the memory in which they were captured."""

    def __init__(self, runtime: FakeStreams) -> None:
        self._runtime = runtime
        self._recording: Recording | None = None
        self.num_replays = 0

    @property
    def streams(self) -> tuple[int, ...]:
        """Handles of the streams whose contexts its kernels run in."""
        return () if self._recording is None else tuple(self._recording.streams)

    def take(self, recording: Recording) -> None:
        self._recording = recording

    def replay(self) -> None:
        if self._recording is None:
            raise RuntimeError("nothing was captured in this graph")
        self.num_replays += 1
        operators = self._recording.operators
        touched = {id(t): t for _, _, a, k, r in operators for t in _tensors((a, k, r))}
        # On CUDA autograd does not see that a replay writes.
        with _preserve_versions(tuple(touched.values())), torch.no_grad(), torch._C._DisableTorchDispatch():
            for _, func, args, kwargs, result in operators:
                again = func(*args, **kwargs)
                for before, now in zip(_tensors(result), _tensors(again), strict=True):
                    if before.untyped_storage()._cdata != now.untyped_storage()._cdata:
                        before.copy_(now)
        written = self._recording.written
        blocks = {t.untyped_storage()._cdata: t for t in touched.values()}
        self._runtime.launch(
            "graph replay",
            [tensor for key, tensor in blocks.items() if key not in written],
            [tensor for key, tensor in blocks.items() if key in written],
        )

    def reset(self) -> None:
        self._recording = None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
