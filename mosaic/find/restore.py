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
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import Generator, generator_state, random_state, set_generator_state
from mosaic.find.torch_settings import SETTINGS, put_back, read
from mosaic.find.trace import Operation, Tracer

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

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class Changes:
    """The changes that one run of a model made; complete once its block has ended.

    Attributes:
        storages: Keys of the memory that it wrote.
        contents: Attributes and containers of the model that differed at the end, with their contents then.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.contents: tuple[tuple[_Container, tuple[Any, ...]], ...] = ()


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
        written=changes.storages.union(*(run.storages for run in earlier)),
        limit_bytes=MAX_COPIED_BYTES if elsewhere else MAX_COPIED_BYTES // 16,
    )

    def restore() -> list[str]:
        with _interrupts_wait():
            steps: list[Callable[[], Any]] = [objects.restore, *memory.steps(), numbers.restore]
            steps += [functools.partial(put_back, *pair) for pair in zip(SETTINGS, settings, strict=True)]
            steps.append(torch.clear_autocast_cache)  # it may hold weights as they were inside
            return [failure for step in steps if (failure := _failure_of(step))]

    try:
        memory.set_gradients_aside()
        for run in earlier:
            objects.refill(run.contents)
        # TorchScript specialises a function in its first optimized runs, which are the loop's.
        unoptimized = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]  # exported under its own name
        with nullcontext() if elsewhere or not memory.storages else _WriteWatch(memory), unoptimized:
            yield changes
        changes.storages, changes.contents = memory.written, objects.changed()
    except BaseException as error:
        for failure in restore():
            error.add_note(f"not restored: {failure}")
        raise
    if failures := restore():
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
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, int]] = deque()
        self.note(model)
        self._num_of_model = len(self._containers)

    def note(self, *roots: Any) -> None:
        """Notes what further objects reach, such as a sample."""
        self._push(roots, 0)
        while self._queue:
            self._visit(*self._queue.popleft())

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

    def changed(self) -> tuple[tuple[_Container, tuple[Any, ...]], ...]:
        """Returns the model's attributes and containers that differ now, with their present contents."""
        own = [(container, before, _content(container)) for container, before in self._containers[: self._num_of_model]]
        return tuple((container, now) for container, before, now in own if not _is_same(now, before))

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
        for undo in self._undo:
            undo()

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
                self._undo.append(functools.partial(set_generator_state, value, generator_state(value)))
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
                        self._undo.append(functools.partial(setattr, cell, "cell_contents", value))


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


class _Tensor:
    """One tensor, as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.alias = tensor if is_traceable_wrapper_subclass(tensor) else tensor.detach()  # of the memory it has now
        self.is_leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.grad = tensor.grad if self.is_leaf else None
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) if self.is_leaf else None
        self.hooks: dict[Any, Any] = dict(hooks or {})  # called once a gradient has been added: an optimizer's step
        self.version = None if tensor.is_inference() else tensor._version
        self.keys = [plain.untyped_storage()._cdata for plain in _plain_tensors(tensor)]

    def restore(self, copied: Set[int]) -> None:
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
        if was_written and not copied >= {*self.keys}:
            raise RuntimeError("another thread, or a call unlike those before, wrote into it, so that it has no copy")


class _Memory:
    """The tensors that a model reaches, as they were.

    Args:
        model: The model, for names.
        objects: Where the tensors were reached.
        written: Keys of storages that an earlier run wrote.
        limit_bytes: Storages that are smaller together are all copied.

    Attributes:
        storages: By its key, the bytes of each storage.
        written: Keys of those that were written.
    """

    def __init__(self, model: nn.Module, objects: Objects, *, written: set[int], limit_bytes: int) -> None:
        self.written = written
        self.storages: dict[int, torch.Tensor] = {}
        self._model = model
        self._copies: dict[int, torch.Tensor] = {}
        for tensor in objects.tensors:
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise UnsupportedModelError(
                    f"{self._name_of(tensor)} has no shape yet; call the model once before it is colocated"
                )
        with _unseen():
            self._tensors = [_Tensor(tensor) for tensor in objects.tensors]
            for plain in [plain for tensor in objects.tensors for plain in _plain_tensors(tensor)]:
                storage = plain.untyped_storage()
                if storage._cdata not in self.storages:
                    whole = torch.empty(0, dtype=torch.uint8, device=plain.device)
                    self.storages[storage._cdata] = whole.set_(storage)  # type: ignore[call-overload]
            is_small = sum(map(len, self.storages.values())) <= limit_bytes
            buffers = {key for each in self._tensors if id(each.tensor) in objects.buffers for key in each.keys}
            self._copy(self.storages if is_small else (buffers | written) & self.storages.keys())

    def _copy(self, keys: Iterable[int]) -> None:
        self._copies |= {key: self.storages[key].clone() for key in keys if key not in self._copies}

    def set_gradients_aside(self) -> None:
        """Leaves every tensor without a gradient, and without what follows when it gets one."""
        for each in self._tensors:
            if each.is_leaf:
                each.tensor.grad = None
                if each.hooks:
                    each.tensor._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]

    def before_write(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            with _unseen():
                plain = [plain for tensor in tensors for plain in _plain_tensors(tensor)]
                keys = {tensor.untyped_storage()._cdata for tensor in plain} & self.storages.keys()
                self.written |= keys
                self._copy(keys)

    def steps(self) -> Iterator[Callable[[], None]]:
        """Yields what restores each tensor and each storage."""
        yield from (functools.partial(self._restore, each) for each in self._tensors)
        yield from (functools.partial(self._restore_storage, key) for key in self._copies)

    def _restore(self, noted: _Tensor) -> None:
        try:
            with _unseen():
                noted.restore(self._copies.keys())
        except Exception as error:  # of any kind: it gets the tensor's name
            raise RuntimeError(
                f"{self._name_of(noted.tensor)}: {error}; load the model's weights again, and leave the module that "
                "writes them where it is called (exclude=...)"
            ) from error

    @_unseen()
    def _restore_storage(self, key: int) -> None:
        if not torch.equal(self.storages[key], self._copies[key]):  # graphs may have saved it as it is
            self.storages[key].copy_(self._copies[key])

    def _name_of(self, tensor: torch.Tensor) -> str:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return next((name for name, each in named if each is tensor), f"a {type(tensor).__name__}")


class _WriteWatch(Tracer[int]):
    """Copies tensors of a model before this thread's operators write into them."""

    also_written = ("running_mean", "running_var")

    def __init__(self, memory: _Memory) -> None:
        super().__init__(0)
        self._memory = memory

    def begin(self, operation: Operation) -> None:
        is_plain = isinstance(operation.operator, torch._ops.OpOverload)  # any other may write into any argument
        self._memory.before_write(operation.written if is_plain else operation.inputs)


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


def _failure_of(step: Callable[[], Any]) -> str:
    try:
        step()
    except Exception as error:  # of any kind: the rest must be restored all the same
        return str(error) or type(error).__name__
    return ""


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C act once the block has ended, so that nothing is restored by half."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    arrived: list[Any] = []
    signal.signal(signal.SIGINT, lambda *signalled: arrived.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        before(*arrived[0])
