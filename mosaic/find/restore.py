"""Restoring a model and its process after a run that training must not notice: a trace, a measurement, a trial.

Noted beforehand are tensors, attributes, containers, arrays and generators that the model, its hooks and its sample
reach, the default random generators and torch's settings; not objects of libraries, iterators, classes and globals.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mosaic.errors import UnsupportedModelError
from mosaic.find.random_numbers import Generator, generator_state, random_state, set_generator_state
from mosaic.find.structure import PLAIN_TYPES, version_of
from mosaic.find.torch_settings import SETTINGS, put_back, read

MAX_COPIED_BYTES = 1 << 30  # parameters that are larger together are not copied, and a write into one is an error
MAX_ARRAY_BYTES = 1 << 26  # a larger array of numpy's is taken for a table that is only read
_MAX_DEPTH = 3  # objects that may lie between a module and something that it changes
_LIBRARIES = sys.stdlib_module_names - {"types", "collections", "argparse"} | {"torch", "numpy", "triton", "mosaic"}

_Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@contextmanager
def preserved(model: nn.Module, sample: Any = None, *, alone: Sequence[Any] = ()) -> Iterator[None]:
    """Restores what running a model changes, bit for bit, also after an error or an interrupt.

    Inside, no tensor has a gradient, and hooks that follow its accumulation are not called. ``sample`` is a batch, or a
    function that runs the model; ``alone`` has ``Subject``s, which run alone. Raises UnsupportedModelError if the model
    wrote into its parameters and they are too large to be copied.
    """
    settings, numbers = read(SETTINGS), random_state()
    objects = Objects(model, sample, [(each.args, each.kwargs) for each in alone])
    tensors = _noted_tensors(model, objects.tensors)

    def restore() -> list[str]:
        put_back(SETTINGS, settings)  # sums depend on the number of threads
        with _unseen():
            failures = [failure for each in tensors if (failure := each.restored())]
        numbers.restore()
        torch.clear_autocast_cache()  # it may hold weights as they were inside
        objects.restore()
        return failures

    try:
        for each in tensors:
            each.set_gradient_aside()
        # TorchScript specialises a function in its first optimized runs, which are the loop's.
        with torch.jit.optimized_execution(False), warnings.catch_warnings():  # type: ignore[attr-defined]
            yield
    finally:
        try:
            failures = restore()
        except KeyboardInterrupt:
            restore()  # from the beginning: nothing stays restored by half
            raise
        if failures:
            raise UnsupportedModelError(
                f"running the model changed state that cannot be restored: {'; '.join(failures)}; load the weights "
                "again, and leave the module that writes them where it is called (exclude=...)"
            )


class Objects:
    """The Python objects that a model or others reach, as they are when this is made."""

    def __init__(self, *roots: Any) -> None:
        self.tensors: list[torch.Tensor] = []  # each once
        self.contents: list[tuple[_Container, tuple[Any, ...]]] = []
        self.others: list[Any] = []  # functions, and what is not noted, such as locks and iterators
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Generator, Any]] = []
        self._seen: set[int] = set()
        self._queue: deque[tuple[Any, int]] = deque()
        self._push(roots, 0)
        while self._queue:
            self._visit(*self._queue.popleft())

    def has(self, value: Any) -> bool:
        return id(value) in self._seen

    def differences(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yields each container, array or generator that differs, a dict's key, and values before and now, or None."""
        for container, content in self.contents:
            if same(now := _content(container), content):
                continue
            if isinstance(container, dict):
                before = _as_dict(content)
                for key in {**before, **container}:
                    if not same(before.get(key), container.get(key)):
                        yield container, key, before.get(key), container.get(key)
            else:
                yield container, None, content, now
        for array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                yield array, None, values, array
        for generator, state in self._generators:
            now = generator_state(generator)
            if not (torch.equal(now, state) if isinstance(now, torch.Tensor) else repr(now) == repr(state)):
                yield generator, None, state, generator

    def difference(self) -> str | None:
        names = (f"a {type(where).__name__}" if key is None else repr(key) for where, key, _, _ in self.differences())
        return next(names, None)

    def restore(self) -> None:
        """Restores all that was noted, except tensors."""
        for container, content in self.contents:
            _refill(container, content)
        for array, values in self._arrays:
            array[...] = values
        for generator, state in self._generators:
            set_generator_state(generator, state)

    def _push(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if not isinstance(value, PLAIN_TYPES) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._queue.append((value, depth))

    def _visit(self, value: Any, depth: int) -> None:
        package = None if hasattr(type(value), "load_state_dict") else type(value).__module__.partition(".")[0]
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if is_traceable_wrapper_subclass(value):
                self._push([getattr(value, name) for name in value.__tensor_flatten__()[0]], depth)
        elif isinstance(value, nn.Module):
            own = (*value.children(), *value.parameters(recurse=False), *value.buffers(recurse=False))
            self._push((vars(value), *own), 0)  # those of scripted modules are in none of their attributes
        elif isinstance(value, dict | list | set | deque):
            self.contents.append((value, _content(value)))
            self._push(self.contents[-1][1], depth)
        elif isinstance(value, tuple | weakref.ref):
            self._push(value if isinstance(value, tuple) else (value(),), depth)
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
            self.others.append(value)
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # nothing is in it yet
                    self._push((cell.cell_contents,), depth)
        elif depth < _MAX_DEPTH and package not in _LIBRARIES and type(getattr(value, "__dict__", None)) is dict:
            self._push((vars(value),), depth + 1)
        else:
            self.others.append(value)


@contextmanager
def restored_objects(model: nn.Module) -> Iterator[Objects]:
    """Restores attributes, containers, arrays, generators and buffers of a model; parameters are not noted."""
    objects = Objects(model)
    buffers = [_Tensor(buffer, "a buffer", is_copied=True) for buffer in model.buffers() if not buffer.is_meta]
    try:
        yield objects
    finally:
        objects.restore()
        with _unseen():
            for buffer in buffers:
                buffer.restored()


def _content(container: _Container) -> tuple[Any, ...]:
    """Returns the items of a container; of a dict its keys and then its values."""
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


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


def _refill(container: _Container, content: tuple[Any, ...]) -> None:
    """Gives a container back the very objects that it had."""
    now = _content(container)
    if len(now) == len(content) and all(map(is_, now, content)):
        return
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
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


class _Tensor:
    def __init__(self, tensor: torch.Tensor, name: str, *, is_copied: bool) -> None:
        self.tensor = tensor
        self._name = name
        is_wrapper = is_traceable_wrapper_subclass(tensor)  # what it wraps is noted, too
        self._alias = tensor if is_wrapper else tensor.detach()  # of the memory that it has now
        self._copy = self._alias.clone() if is_copied and not is_wrapper else None
        self._digest = None if is_copied or is_wrapper else _digest(tensor)
        self._is_leaf, self._requires_grad = tensor.is_leaf, tensor.requires_grad
        self._grad = tensor.grad if self._is_leaf else None
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None) if self._is_leaf else None
        self._hooks: dict[Any, Any] = dict(hooks or {})  # called once a gradient has been added: an optimizer's step

    def set_gradient_aside(self) -> None:
        if self._is_leaf:
            self.tensor.grad = None
        if self._hooks:
            self.tensor._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]

    def restored(self) -> str | None:
        """Restores the tensor; returns why not, if it cannot."""
        tensor = self.tensor
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
            was_written = self._digest is not None and _digest(tensor) != self._digest
        except Exception as error:  # of any kind: the rest must be restored all the same
            return f"{self._name}: {error}"
        return f"{self._name} was written to, and is too large to be copied before" if was_written else None


def _noted_tensors(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[_Tensor]:
    """Notes tensors with copies, parameters only where they are not too large together."""
    names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
    if lazy := [names.get(id(each), "a tensor") for each in tensors if is_lazy(each)]:
        raise UnsupportedModelError(f"{lazy[0]} has no shape yet; call the model once before it is colocated")
    is_small = sum(p.numel() * p.element_size() for p in tensors if isinstance(p, nn.Parameter)) <= MAX_COPIED_BYTES
    with _unseen():
        return [
            _Tensor(each, names.get(id(each), "a tensor"), is_copied=is_small or not isinstance(each, nn.Parameter))
            for each in tensors
        ]


def _digest(tensor: torch.Tensor) -> tuple[int | None, str]:
    """Returns the number of a tensor's writes that torch counts and the sum of its values."""
    try:
        return version_of(tensor), str(tensor.detach().sum(dtype=torch.float64).item())
    except (RuntimeError, NotImplementedError):  # sparse tensors, those on the meta device and tiny floats
        return version_of(tensor), ""


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
