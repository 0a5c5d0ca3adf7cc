"""Restoring a model and its process after a run that training must not notice: a trace, a measurement, a trial.

Noted beforehand are the tensors that the model and its sample reach (values, gradients, ``requires_grad``, hooks on
gradients), the attributes of its modules and of plain objects in them with the lists, dicts, sets, arrays and
generators that these hold, what its hooks enclose, the data that its methods enclose, the default random generators,
and torch's settings. Objects of libraries, iterators, attributes of classes, and globals are left alone.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import Generator, generator_state, random_state, set_generator_state
from mosaic.find.torch_settings import SETTINGS, put_back, read
from mosaic.find.trace import written_by

MAX_COPIED_BYTES = 1 << 28
"""Tensors that are smaller together are all copied; of larger models buffers, and memory before it is written. Where
writes are watched, a sixteenth of it."""
MAX_ARRAY_BYTES = 1 << 26
"""A larger array of numpy's is taken for a table that is only read."""
_MAX_DEPTH = 3
"""Objects that may lie between a module and something that it changes."""

_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, slice, range, property),
        *(type, BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    )
)
_LIBRARIES = sys.stdlib_module_names - {"types", "collections"} | {"torch", "numpy", "triton", "mosaic"}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_RUNNING_STATISTICS = ("running_mean", "running_var")
"""Arguments that normalizations write into, which their schemas do not say."""

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class Changes:
    """The changes that one run of a model made; complete once its block has ended.

    Attributes:
        storages: Keys of the memory that it wrote.
        containers: Attributes and containers of the model that differed at the end, with their contents then.
    """

    def __init__(self) -> None:
        self.storages: frozenset[int] = frozenset()
        self.containers: tuple[tuple[_Container, tuple[Any, ...]], ...] = ()


@contextmanager
def preserved(
    model: nn.Module, sample: Any = None, *, alone: Sequence[Any] = (), elsewhere: bool = False
) -> Iterator[Changes]:
    """Restores what running a model changes, bit for bit, also after an error or an interrupt.

    Inside, no tensor has a gradient, and hooks that follow its accumulation are not called.

    Args:
        model: The model.
        sample: A batch, or a function that runs the model.
        alone: Modules that run alone, as ``Subject``s. They find the attributes that a run of the whole model leaves
            them.
        elsewhere: The model runs on other threads too, or is timed: memory that an earlier run wrote is copied at once.
            By default the operators of this thread are watched, and memory of a large model is copied just before it
            is written.

    Yields:
        The changes of the block.

    Raises:
        UnsupportedModelError: Something changed that was not noted.
    """
    earlier = {id(each.changes): each.changes for each in alone if each.changes is not None}.values()
    settings, numbers, changes = read(SETTINGS), random_state(), Changes()
    objects = Objects(model)
    objects.note(sample, [(each.args, each.kwargs) for each in alone])
    memory = _Memory(
        model,
        objects,
        written=[key for run in earlier for key in run.storages],
        limit_bytes=MAX_COPIED_BYTES if elsewhere else MAX_COPIED_BYTES // 16,
    )

    def steps() -> Iterator[Callable[[], Any]]:
        yield objects.restore
        yield from memory.steps()
        yield numbers.restore
        for setting, before in zip(SETTINGS, settings, strict=True):
            yield functools.partial(put_back, setting, before)
        yield torch.clear_autocast_cache  # it may hold weights as they were inside

    try:
        memory.set_gradients_aside()
        for run in earlier:
            objects.refill(run.containers)
        # TorchScript specialises a function in its first optimized runs, which are the loop's.
        unoptimized = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]  # exported under its own name
        with nullcontext() if elsewhere or memory.is_empty else _WriteWatch(memory), unoptimized:
            yield changes
        changes.storages, changes.containers = frozenset(memory.written), tuple(objects.changed())
    except BaseException as error:
        with _interrupts_wait():
            for failure in _failures_of(steps()):
                error.add_note(f"not restored: {failure}")
        raise
    with _interrupts_wait():
        failures = _failures_of(steps())
    if failures:
        raise UnsupportedModelError(f"running the model changed what cannot be restored: {'; '.join(failures)}")


class Objects:
    """The Python objects that a model reaches, as they are when this is made.

    Attributes:
        tensors: All tensors, each once.
        buffers: Ids of those that are buffers of a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[torch.Tensor] = []
        self.buffers: set[int] = set()
        self._containers: list[tuple[_Container, tuple[Any, ...]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Generator, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, int]] = deque()
        self.note(model)
        self._num_of_model = len(self._containers)

    def note(self, *roots: Any) -> None:
        """Notes what further objects reach, such as a sample."""
        self._push(roots, 0)
        while self._queue:
            self._visit(*self._queue.popleft())

    def changed(self) -> Iterator[tuple[_Container, tuple[Any, ...]]]:
        """Yields the model's attributes and containers that differ now, with their present contents."""
        for container, content in self._containers[: self._num_of_model]:
            if not _is_same(now := _content(container), content):
                yield container, now

    def differences(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yields each container or array that differs, the key in a dict, and the values before and now.

        An absent value is None; contents of tensors are not compared.
        """
        for container, content in self._containers:
            now = _content(container)
            if not same(now, content) and isinstance(container, dict):
                before = dict(zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True))
                for key in {**before, **container}:
                    old, new = before.get(key), container.get(key)
                    if not same(old, new):
                        yield container, key, old, new
            elif not same(now, content):
                yield container, None, content, now
        for array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                yield array, None, values, array

    def difference(self) -> str | None:
        for container, key, _, _ in self.differences():
            return f"a {type(container).__name__}" if key is None else repr(key)
        return None

    def refill(self, contents: Iterable[tuple[_Container, tuple[Any, ...]]]) -> None:
        """Gives containers the contents of an earlier run; those that ``restore`` does not know keep theirs."""
        for container, content in contents:
            if id(container) in self._seen:
                _refill(container, content)

    def restore(self) -> None:
        """Restores all that was noted, except tensors."""
        for container, content in self._containers:
            if not _is_same(_content(container), content):
                _refill(container, content)
        for array, values in self._arrays:
            array[...] = values
        for generator, state in self._generators:
            set_generator_state(generator, state)
        for cell, value in self._cells:
            cell.cell_contents = value

    def _push(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen.add(id(value))
                self._queue.append((value, depth))

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, nn.Module):
            own = list(value.buffers(recurse=False))
            self.buffers.update(map(id, own))
            # Those of scripted modules are in none of their attributes.
            self._push((vars(value), *value.children(), *value.parameters(recurse=False), *own), 0)
            for kind in type(value).__mro__:
                if id(kind) not in self._seen and _is_plain(kind):
                    self._seen.add(id(kind))
                    self._note_enclosed(vars(kind).values())
        elif isinstance(value, dict | list | set | deque):
            content = _content(value)
            self._containers.append((value, content))
            self._push(content, depth)
        elif isinstance(value, tuple):
            self._push(value, depth)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= MAX_ARRAY_BYTES:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, Generator):
            with suppress(NotImplementedError):  # the system's own has no state
                self._generators.append((value, generator_state(value)))
        elif isinstance(value, functools.partial):
            self._push((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            self._push((value.__self__, value.__func__), depth)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # nothing is in it yet
                    self._push((cell.cell_contents,), depth)
        elif depth < _MAX_DEPTH and _is_plain(type(value)):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict and not any(isinstance(each, threading.Thread) for each in attributes.values()):
                self._push((attributes,), depth + 1)  # a thread of its own would change them meanwhile

    def _note_enclosed(self, functions: Iterable[Any]) -> None:
        """Notes the data that methods enclose, but neither functions nor objects."""
        for function in functions:
            for cell in getattr(function, "__closure__", None) or ():
                with suppress(ValueError):  # nothing is in it yet
                    value = cell.cell_contents
                    if isinstance(value, (torch.Tensor, Generator, np.ndarray, dict, list, set, deque)):
                        self._push((value,), 0)
                    elif type(value) in _ATOMS:
                        self._cells.append((cell, value))


@contextmanager
def restored_objects(model: nn.Module) -> Iterator[Objects]:
    """Restores attributes, containers, arrays, generators and buffers of a model; parameters are not noted."""
    objects = Objects(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield objects
    finally:
        objects.restore()
        with torch.no_grad():
            for buffer, content in buffers:
                if not torch.equal(buffer, content):  # a graph may have saved it: no needless write
                    buffer.copy_(content)


def _is_plain(kind: type) -> bool:
    return not issubclass(kind, (type, Enum)) and kind.__module__.partition(".")[0] not in _LIBRARIES


def _content(container: _Container) -> tuple[Any, ...]:
    """Returns the items of a container; of a dict its keys and then its values."""
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def _is_same(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def same(first: Any, second: Any) -> bool:
    """Returns True if two values are the same as far as Python can tell."""
    if first is second:
        return True
    try:
        return bool(first == second)
    except Exception:  # tensors and arrays of several elements answer with as many
        return False


def _refill(container: _Container, content: tuple[Any, ...]) -> None:
    if isinstance(container, dict):
        base = OrderedDict if isinstance(container, OrderedDict) else dict  # whatever a subclass does with an item
        base.clear(container)
        for key, value in zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True):
            base.__setitem__(container, key, value)
        return
    container.clear()
    container.update(content) if isinstance(container, set) else container.extend(content)


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, nobody watches the operators of this thread, and nothing is recorded."""
    recorded = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        torch._C._set_grad_enabled(False)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(recorded)


class _Bytes:
    """The memory of one tensor, and its copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        storage = tensor.untyped_storage()
        self.key: int = storage._cdata
        self.start = int(tensor.storage_offset()) * size
        self.end = self.start + int(span) * size
        self.now = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.now.set_(storage, self.start, (span * size,))  # type: ignore[call-overload]
        self.copy: torch.Tensor | None = None

    def save(self) -> None:
        if self.copy is None:
            self.copy = self.now.clone()

    @_unseen()
    def restore(self) -> None:
        if self.copy is not None and not torch.equal(self.now, self.copy):  # graphs may have saved it as it is
            self.now.copy_(self.copy)


class _TensorNote:
    """One tensor, as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.alias = tensor if is_traceable_wrapper_subclass(tensor) else tensor.detach()  # of the memory it has now
        self.is_leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if self.is_leaf else None
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) if self.is_leaf else None
        self.hooks: dict[Any, Any] = dict(hooks or {})  # called once a gradient has been added: an optimizer's step
        self.version = None if tensor.is_inference() else tensor._version
        self.pieces = [_Bytes(plain) for plain in _plain_tensors(tensor)]

    def set_gradient_aside(self) -> None:
        if self.is_leaf:
            self.tensor.grad = None
            if self.hooks:
                self.tensor._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]

    @_unseen()
    def restore(self) -> None:
        tensor = self.tensor
        was_written = self.version is not None and tensor._version != self.version
        if self.is_leaf:
            if not tensor.is_leaf:
                tensor.detach_()
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
        if _layout_of(tensor) != _layout_of(self.alias):
            tensor.data = self.alias
        if self.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad
        if self.hooks:
            tensor._post_accumulate_grad_hooks.update(self.hooks)  # type: ignore[attr-defined]
        if was_written and any(piece.copy is None for piece in self.pieces):
            raise RuntimeError("another thread, or a call unlike those before, wrote into it, so that it has no copy")


class _Memory:
    """The tensors that a model reaches, as they were.

    Args:
        model: The model, for names.
        objects: Where the tensors were reached.
        written: Keys of storages that an earlier run wrote.
        limit_bytes: Tensors that are smaller together are all copied.
    """

    def __init__(self, model: nn.Module, objects: Objects, *, written: Collection[int], limit_bytes: int) -> None:
        self.written: set[int] = set(written)
        self._model = model
        self._by_storage: dict[int, list[_Bytes]] = {}
        for tensor in objects.tensors:
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise UnsupportedModelError(
                    f"{self._name_of(tensor)} has no shape yet; call the model once before it is colocated"
                )
        with _unseen():
            self._notes = [_TensorNote(tensor) for tensor in objects.tensors]
            pieces = [piece for note in self._notes for piece in note.pieces]
            is_small = sum(piece.end - piece.start for piece in pieces) <= limit_bytes
            for note in self._notes:
                for piece in note.pieces:
                    self._by_storage.setdefault(piece.key, []).append(piece)
                    if is_small or id(note.tensor) in objects.buffers or piece.key in self.written:
                        piece.save()

    @property
    def is_empty(self) -> bool:
        """True if no tensor has memory, as on the meta device."""
        return not self._by_storage

    def set_gradients_aside(self) -> None:
        """Leaves every tensor without a gradient, and without what follows when it gets one."""
        for note in self._notes:
            note.set_gradient_aside()

    def before_write(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                self.before_write(item)
        elif isinstance(value, torch.Tensor):
            with _unseen():
                for plain in _plain_tensors(value):
                    storage = plain.untyped_storage()._cdata
                    if storage in self._by_storage:
                        self.written.add(storage)
                        span = _Bytes(plain)
                        for piece in self._by_storage[storage]:
                            if piece.start < span.end and span.start < piece.end:
                                piece.save()

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yields what restores each tensor."""
        for note in self._notes:
            yield functools.partial(self._restore, note)
            for piece in note.pieces:
                yield piece.restore

    def _restore(self, note: _TensorNote) -> None:
        try:
            note.restore()
        except Exception as error:  # of any kind: it gets the tensor's name
            raise RuntimeError(
                f"{self._name_of(note.tensor)}: {error}; load the model's weights again, and leave the module that "
                "writes them where it is called (exclude=...)"
            ) from error

    def _name_of(self, tensor: torch.Tensor) -> str:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return next((name for name, each in named if each is tensor), f"a {type(tensor).__name__}")


class _WriteWatch(TorchDispatchMode):
    """Copies tensors of a model before this thread's operators write into them."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets what the model compiles itself be compiled."""
        return True

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_plain = isinstance(func, torch._ops.OpOverload)  # any other may write into any argument
        written = written_by(func, args, kwargs, _RUNNING_STATISTICS) if is_plain else (*args, *kwargs.values())
        self._memory.before_write(written)
        return func(*args, **kwargs)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are over the same memory in the same way."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in _plain_tensors(tensor)]
    return tensor.dtype, tensor.shape, tensor.device, places


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory of their own that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):
                yield from _plain_tensors(inner)
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield tensor.values()
    elif tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.numel() and not tensor.is_nested:
        yield tensor


def _failures_of(steps: Iterator[Callable[[], Any]]) -> list[str]:
    failures = []
    for step in steps:
        try:
            step()
        except Exception as error:  # of any kind: the rest must be restored all the same
            failures.append(str(error))
    return failures


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C act once the block has ended, so that nothing is restored by half."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
