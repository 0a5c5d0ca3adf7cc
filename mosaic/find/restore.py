"""Restoring a model and its process after a run that training must not notice: a trace, a measurement, a trial.

Noted beforehand are the tensors that the model and its sample reach (values, gradients, ``requires_grad``, hooks on
gradients), the attributes of its modules and of plain objects in them with the lists, dicts, sets, arrays and
generators that these hold, what its hooks enclose, the default random generators, and torch's settings. Objects of
libraries, iterators, attributes of classes, globals and what methods enclose are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
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
from mosaic.find.structure import version_of
from mosaic.find.torch_settings import SETTINGS, put_back, read
from mosaic.find.trace import Operation, Tracer, caller

MAX_COPIED_BYTES = 1 << 30
"""Parameters that are larger together are not copied, and writes into them are refused; other tensors always are."""
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

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
Contents = list[tuple[_Container, tuple[Any, ...]]]
"""Attributes of modules and containers with what is in them at one moment."""


@contextmanager
def preserved(
    model: nn.Module, sample: Any = None, *, alone: Sequence[Any] = (), elsewhere: bool = False
) -> Iterator[Contents]:
    """Restores what running a model changes, bit for bit, also after an error or an interrupt.

    Inside, no tensor has a gradient, and hooks that follow its accumulation are not called.

    Args:
        model: The model.
        sample: A batch, or a function that runs the model.
        alone: Modules that run alone, as ``Subject``s. They find the attributes that a run of the whole model leaves
            them.
        elsewhere: The model runs on other threads too, or is timed. By default the operators of this thread are
            watched, and one that would write into a parameter without a copy is refused.

    Yields:
        The attributes and containers that the block changed, as it leaves them; complete once it has ended.

    Raises:
        UnsupportedModelError: The model writes into its parameters and is too large to be copied.
    """
    settings, numbers = read(SETTINGS), random_state()
    left: Contents = []
    objects = Objects(model)
    of_model = len(objects.contents)
    objects.note(sample, [(each.args, each.kwargs) for each in alone])
    tensors = _noted_tensors(model, objects.tensors)
    uncopied = [] if elsewhere else [each for each in tensors if each.is_uncopied]

    def restore() -> list[str]:
        with _unseen():
            failures = [failure for each in tensors if (failure := each.restored())]
        numbers.restore()
        put_back(SETTINGS, settings)
        torch.clear_autocast_cache()  # it may hold weights as they were inside
        objects.restore()
        return failures

    try:
        for each in tensors:
            each.set_gradient_aside()
        for run in {id(each.left): each.left for each in alone if each.left is not None}.values():
            _refill([(container, content) for container, content in run if objects.has(container)])
        # TorchScript specialises a function in its first optimized runs, which are the loop's.
        unoptimized = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]  # exported under its own name
        with _WriteWatch(uncopied) if uncopied else nullcontext(), unoptimized:
            yield left
        for container, before in objects.contents[:of_model]:
            if not _is_same(now := _content(container), before):
                left.append((container, now))
    finally:
        try:
            failures = restore()
        except KeyboardInterrupt:
            restore()  # from the beginning: nothing stays restored by half
            raise
        if failures:
            raise UnsupportedModelError(
                f"running the model changed what cannot be restored: {'; '.join(failures)}; load the model's weights "
                "again, and leave the module that writes them where it is called (exclude=...)"
            )


class Objects:
    """The Python objects that a model or others reach, as they are when this is made.

    Attributes:
        tensors: All tensors, each once.
        contents: Containers with their contents.
    """

    def __init__(self, *roots: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.contents: Contents = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Generator, Any]] = []
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, int]] = deque()
        self.note(*roots)

    def has(self, value: Any) -> bool:
        return id(value) in self._seen

    def note(self, *roots: Any) -> None:
        """Notes what further objects reach, such as a sample."""
        self._push(roots, 0)
        while self._queue:
            self._visit(*self._queue.popleft())

    def differences(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yields each container or array that differs, the key in a dict, and the values before and now.

        An absent value is None; contents of tensors are not compared.
        """
        for container, content in self.contents:
            now = _content(container)
            if same(now, content):
                continue
            if not isinstance(container, dict):
                yield container, None, content, now
                continue
            before = _as_dict(content)
            for key in {**before, **container}:
                if not same(before.get(key), container.get(key)):
                    yield container, key, before.get(key), container.get(key)
        for array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                yield array, None, values, array

    def difference(self) -> str | None:
        for container, key, _, _ in self.differences():
            return f"a {type(container).__name__}" if key is None else repr(key)
        return None

    def restore(self) -> None:
        """Restores all that was noted, except tensors."""
        _refill(self.contents)
        for array, values in self._arrays:
            array[...] = values
        for generator, state in self._generators:
            set_generator_state(generator, state)

    def _push(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if type(value) not in _ATOMS and id(value) not in self._seen:
                self._seen.add(id(value))
                self._queue.append((value, depth))

    def _visit(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if is_traceable_wrapper_subclass(value):
                self._push([getattr(value, name) for name in value.__tensor_flatten__()[0]], depth)
        elif isinstance(value, nn.Module):
            own = (*value.children(), *value.parameters(recurse=False), *value.buffers(recurse=False))
            self._push((vars(value), *own), 0)  # those of scripted modules are in none of their attributes
        elif isinstance(value, dict | list | set | deque):
            content = _content(value)
            self.contents.append((value, content))
            self._push(content, depth)
        elif isinstance(value, tuple):
            self._push(value, depth)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= MAX_ARRAY_BYTES:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, Generator):
            self._generators.append((value, generator_state(value)))
        elif isinstance(value, functools.partial):
            self._push((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            self._push((value.__self__, value.__func__), depth)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # nothing is in it yet
                    self._push((cell.cell_contents,), depth)
        elif depth < _MAX_DEPTH and _is_plain(type(value)) and type(getattr(value, "__dict__", None)) is dict:
            self._push((vars(value),), depth + 1)


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


def _as_dict(content: tuple[Any, ...]) -> dict[Any, Any]:
    half = len(content) // 2
    return dict(zip(content[:half], content[half:], strict=True))


def same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return bool(first == second)
    except Exception:  # tensors and arrays of several elements answer with as many
        return False


def _refill(contents: Contents) -> None:
    """Gives containers back the very objects that they had."""
    for container, content in contents:
        if _is_same(_content(container), content):
            continue
        if isinstance(container, dict):
            base = OrderedDict if isinstance(container, OrderedDict) else dict  # whatever a subclass does with an item
            base.clear(container)
            base.update(container, _as_dict(content))
        else:
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

    def __init__(self, tensor: torch.Tensor, name: str, *, is_copied: bool) -> None:
        self.tensor = tensor
        self.name = name
        is_wrapper = is_traceable_wrapper_subclass(tensor)  # what it wraps is noted, too
        self._alias = tensor if is_wrapper else tensor.detach()  # of the memory that it has now
        self.is_uncopied = not is_copied and not is_wrapper
        self._copy = self._alias.clone() if is_copied and not is_wrapper else None
        self._is_leaf, self._requires_grad = tensor.is_leaf, tensor.requires_grad
        self._grad = tensor.grad if self._is_leaf else None
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) if self._is_leaf else None
        self._hooks: dict[Any, Any] = dict(hooks or {})  # called once a gradient has been added: an optimizer's step
        self._version = None if is_wrapper else version_of(tensor)

    def set_gradient_aside(self) -> None:
        """Leaves the tensor without a gradient, and without what follows when it gets one."""
        if self._is_leaf:
            self.tensor.grad = None
        if self._hooks:
            self.tensor._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]

    def restored(self) -> str | None:
        """Restores the tensor; returns why not, if it cannot."""
        tensor, was_written = self.tensor, self._version is not None and version_of(self.tensor) != self._version
        try:
            if self._is_leaf and not tensor.is_leaf:
                tensor.detach_()
            if self._is_leaf and tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor is not self._alias and _layout_of(tensor) != _layout_of(self._alias):
                tensor.data = self._alias
            if self._is_leaf and tensor.grad is not self._grad:
                tensor.grad = self._grad
            if self._hooks:
                tensor._post_accumulate_grad_hooks.update(self._hooks)  # type: ignore[attr-defined]
            if self._copy is not None and not _are_equal(tensor, self._copy):  # graphs may have saved it as it is
                with torch.inference_mode() if tensor.is_inference() else nullcontext():
                    tensor.copy_(self._copy)
        except Exception as error:  # of any kind: the rest must be restored all the same
            return f"{self.name}: {error}"
        return f"{self.name}: another thread wrote into it" if was_written and self.is_uncopied else None


def _noted_tensors(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[_Tensor]:
    """Notes tensors with copies, parameters only where they are not too large together."""
    names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
    for each in tensors:
        if isinstance(each, (UninitializedParameter, UninitializedBuffer)):
            raise UnsupportedModelError(
                f"{names.get(id(each), 'a tensor')} has no shape yet; call the model once before it is colocated"
            )
    parameters = {id(each): each for each in tensors if isinstance(each, nn.Parameter)}
    is_small = sum(each.numel() * each.element_size() for each in parameters.values()) <= MAX_COPIED_BYTES
    with _unseen():
        return [
            _Tensor(each, names.get(id(each), "a tensor"), is_copied=is_small or id(each) not in parameters)
            for each in tensors
        ]


class _WriteWatch(Tracer[int]):
    """Refuses operators of this thread that would write into tensors without a copy."""

    def __init__(self, tensors: Sequence[_Tensor]) -> None:
        super().__init__(0)
        self._names = {self.memory(each.tensor): each.name for each in tensors}

    def begin(self, operation: Operation) -> None:
        for tensor in operation.written:
            if (name := self._names.get(self.memory(tensor))) is not None:
                raise UnsupportedModelError(
                    f"the model writes into {name} while it runs ({operation.name}), and is too large to be copied "
                    f"before; let the loop write it, or call the module that does ({caller()}) outside of the model"
                )


def _are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, other)
    except (RuntimeError, NotImplementedError):  # sparse tensors and those on the meta device
        return False


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what two tensors have in common that are over the same memory in the same way."""
    is_strided = tensor.layout == torch.strided
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()) if is_strided else ()
    return tensor.dtype, tensor.shape, tensor.device, place
