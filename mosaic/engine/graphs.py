"""Placed modules as CUDA graphs on their lanes, by the recipe of ``torch.cuda.make_graphed_callables``.

A module's call is tried a few times off the lane, then its forward and its backward are captured on the lane's stream.
From then on a call copies its inputs to where the graph reads them, replays it, and returns copies of what it left.
Results hang in the caller's autograd graph by one node, whose inputs are the call's differentiable inputs and the
module's parameters: hooks, accumulation, clipping and ``torch.autograd.grad`` see nothing unusual.

A replay runs no Python. A capture is used while inputs have its shapes, types and plain values, torch its settings, the
module its parts, parameters, hooks and attributes, and the globals and enclosed variables that its methods name.
What functions read that these call is not compared.
What cannot be captured runs eagerly on its lane; ``eager_calls`` has its name and the reason.

What differs from an eager call: a gradient of an input or a parameter that is used several times is summed inside
first, and under autocast a weight is cast at each of its uses. Both are within rounding.
"""

from __future__ import annotations

import contextvars
import enum
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from mosaic.backends.streams.api import StreamApi
from mosaic.backends.streams.lanes import StreamLane
from mosaic.engine.calls.structure import PLAIN_TYPES, flatten, is_opaque, leaf_key, tensors_in, unflatten
from mosaic.engine.calls.thread_state import as_lane, is_traced, saved_tensor_hooks, surrounding
from mosaic.engine.calls.torch_functions import written_arguments
from mosaic.errors import MosaicError
from mosaic.find.random_numbers import CPU, forked, python_state, torch_state
from mosaic.find.restore import Objects

NUM_TRIALS = 3
"""Runs before a capture, as in ``torch.cuda.make_graphed_callables``: libraries plan and tune at their first use."""

_MAX_CAPTURES = 12
"""Kinds of calls of one module, such as shapes, that are captured; further ones run eagerly."""

_MAX_ATTEMPTS = 3
"""Failed tries of one kind of call after which it runs eagerly for good."""

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


class RefusalError(Exception):
    """A call cannot be captured.

    Attributes:
        reason: The reason, as the end of a sentence that starts with the module's name.
        lasting: Whether a later call of the same kind would fare no better.
    """

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """One call of a placed module. The current stream is that of its lane."""

    name: str
    module: nn.Module
    lane: StreamLane
    run: Callable[..., Any]
    """Makes the call."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ModuleGraphs:
    """The captured calls of the modules on one device.

    Attributes:
        refused: For each module that runs eagerly for good, the reason.
        eager_calls: How often each module ran eagerly, by name and reason.
        num_captures: Kinds of calls captured so far.
        num_replays: Forwards by replay so far.
    """

    def __init__(self, api: StreamApi) -> None:
        self.refused: dict[str, str] = {}
        self.eager_calls: Counter[tuple[str, str]] = Counter()
        self.num_captures = 0
        self.num_replays = 0
        self._api = api
        self._side = api.new_stream()  # trial runs are on it: some libraries cannot plan on a green context's stream
        self._captures: list[_Capture] = []
        self._made: Counter[str] = Counter()
        self._attempts: Counter[Hashable] = Counter()
        self._left_alone: dict[Hashable, str] = {}
        self._closed = False
        # it runs before that of the lanes
        self._finalizer = weakref.finalize(self, _end, api, self._captures, self._side, os.getpid())

    def call(self, call: GraphCall) -> Any:
        """Makes a call by replay, captures it first where that was not done, or launches it in the plain way."""
        if self._closed:
            raise MosaicError("these graphs are closed; colocate the model again to make new ones")
        reason = self._interception()
        if reason is None:
            try:
                inputs = _Inputs(call, self._api.device)
                return self._replayed(call, inputs)
            except RefusalError as refusal:
                reason = refusal.reason
        self.eager_calls[call.name, reason] += 1
        return call.run(*call.args, **call.kwargs)

    @property
    def is_in_flight(self) -> bool:
        """Whether a forward by replay waits for its backward."""
        return any(capture.in_flight for capture in self._captures)

    def close(self) -> None:
        """Lets all graphs go, after the device has come to rest; to be called before the streams end."""
        self._closed = True
        self._finalizer()

    def _interception(self) -> str | None:
        if is_traced():
            return "it is being traced"
        if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
            return "another torch mode is active"
        return surrounding() or ("it is being captured by somebody else" if self._api.is_capturing() else None)

    def _replayed(self, call: GraphCall, inputs: _Inputs) -> Any:
        key = (call.name, id(call.lane), id(call.module), inputs.key, _torch_settings(self._api.device.type))
        if key in self._left_alone:
            raise RefusalError(self._left_alone[key])
        capture = self._find(key)
        if capture is None:
            try:
                capture = self._capture(key, call, inputs)
            except RefusalError as refusal:
                self._attempts[key] += 1
                if refusal.lasting or self._attempts[key] >= _MAX_ATTEMPTS:
                    self._left_alone[key] = self.refused[call.name] = refusal.reason
                raise
        if capture.in_flight:
            raise RefusalError(
                "an earlier call of the same kind has not gone backward yet, and a replay would overwrite it"
            )
        self.num_replays += 1
        tensors, inputs.tensors = inputs.tensors, []  # a capture keeps neither the caller's memory nor autograd graph
        return capture.replay(tensors)

    def _find(self, key: Hashable) -> _Capture | None:
        for capture in [capture for capture in self._captures if capture.key == key]:
            if capture.is_differentiated_twice:
                self._drop(capture)
                self._left_alone[key] = self.refused[capture.name] = (
                    "its gradients are taken with create_graph=True, and a graph has no gradients of gradients"
                )
                raise RefusalError(self._left_alone[key])
            if capture.state.is_replaced():
                self._drop(capture)
            elif capture.state.change() is None:
                return capture
        return None

    def _drop(self, capture: _Capture) -> None:
        self._captures.remove(capture)
        self._api.synchronize()  # it may still be running
        if not capture.in_flight:
            capture.close()

    def _capture(self, key: Hashable, call: GraphCall, inputs: _Inputs) -> _Capture:
        if self._made[call.name] >= _MAX_CAPTURES:
            raise RefusalError(f"{_MAX_CAPTURES} kinds of its calls are captured, and this is another")
        state = _ModuleState(call.module, self._api.device)
        state.check()
        static = inputs.static_copies()
        with state.without_trace():
            self._api.synchronize()
            try:
                with self._api.use_stream(self._side):
                    _try_out(inputs, static, state, self._api)
            except Exception as error:  # whatever the module raises, it may raise it again where it runs eagerly
                clear_frames(error.__traceback__)  # in torch 2.11 a checkpoint's hooks stay active as long as its frame
                if isinstance(error, RefusalError):
                    raise
                raise RefusalError(f"trying it failed: {_first_line(error)}", lasting=False) from error
            finally:
                self._api.synchronize()
        capture = _Capture(key, call, state, static, self._api)
        try:
            capture.record(inputs)
        except RefusalError:
            raise
        except Exception as error:  # torch's and the driver's answers to what a capture cannot hold
            raise RefusalError(f"capturing it failed: {_first_line(error)}") from error
        self._made[call.name] += 1
        self.num_captures += 1
        self._captures.append(capture)
        return capture


def _end(api: StreamApi, captures: list[_Capture], side: Any, process: int) -> None:
    if os.getpid() == process:  # the child of a fork has no driver
        api.synchronize()
        for capture in captures:
            capture.close()
        api.give_back(side)
    captures.clear()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# The kind of a call.


class _Inputs:
    """A call's arguments, taken apart.

    Attributes:
        tensors: The distinct tensors, in order of appearance.
        key: Equal for calls of one kind: nesting, shapes and types of tensors, and values of other arguments.

    Raises:
        RefusalError: An argument cannot be handed to a graph.
    """

    def __init__(self, call: GraphCall, device: torch.device) -> None:
        leaves, self._spec = flatten((call.args, call.kwargs))
        self.tensors: list[torch.Tensor] = []
        self._run = call.run
        self._leaves: list[Any] = []  # the index of a tensor, or (value,) of anything else
        numbers: dict[int, int] = {}
        keys: list[Hashable] = []
        grad = torch.is_grad_enabled()
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                _check_tensor(leaf, device)
                number = numbers.setdefault(id(leaf), len(self.tensors))
                if number == len(self.tensors):
                    self.tensors.append(leaf)
                self._leaves.append(number)
                keys.append((number, leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad and grad))
            elif isinstance(leaf, enum.Enum) or not is_opaque(leaf):
                self._leaves.append((leaf,))
                keys.append((type(leaf), leaf.name) if isinstance(leaf, enum.Enum) else leaf_key(leaf))
            else:
                raise RefusalError(f"it takes a {type(leaf).__name__}, which may hide tensors")
        self.key: Hashable = (self._spec, tuple(keys))

    def static_copies(self) -> list[torch.Tensor]:
        """Makes leaves like the tensors, with their values, on the current stream."""
        grad = torch.is_grad_enabled()
        copied = []
        for tensor in self.tensors:
            static = torch.empty_like(tensor, requires_grad=False)
            static.copy_(tensor.detach())
            copied.append(static.requires_grad_(tensor.requires_grad and grad))
        return copied

    def run_on(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Makes the call with other tensors in place of its own."""
        leaves = [leaf[0] if isinstance(leaf, tuple) else tensors[leaf] for leaf in self._leaves]
        args, kwargs = unflatten(leaves, self._spec)
        return self._run(*args, **kwargs)


def _check_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in _PLAIN_TENSORS:
        raise RefusalError(f"it takes a {type(tensor).__name__}, not a plain tensor")
    if tensor.device != device:
        raise RefusalError(f"it takes a tensor on {tensor.device}, not on {device}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        raise RefusalError("it takes a sparse, nested or lazily conjugated tensor")


_SETTINGS: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    *(
        getattr(torch._C, name)
        for name in (
            "_get_sdp_priority_order",
            "_get_math_sdp_allow_fp16_bf16_reduction",
            "_get_deterministic_fill_uninitialized_memory",
            "_get_cudnn_enabled",
            "_get_cudnn_benchmark",
            "_get_cudnn_deterministic",
            "_get_cudnn_allow_tf32",
            "_get_cublas_allow_tf32",
            "_get_cublas_allow_fp16_accumulation",
            "_get_cublas_allow_fp16_reduced_precision_reduction",
            "_get_cublas_allow_bf16_reduced_precision_reduction",
            "_get_blas_preferred_backend",
            "_get_linalg_preferred_backend",
        )
        if hasattr(torch._C, name)
    ),
)


def _torch_settings(device: str) -> Hashable:
    """Returns the settings of torch that decide which kernels a call runs; a replay keeps those of its capture."""

    def value(getter: Callable[[], Any]) -> Hashable:
        try:
            setting = getter()
        except RuntimeError as error:  # torch's answer where its old and new settings of precision were mixed
            return str(error)
        return tuple(setting) if isinstance(setting, list) else setting  # type: ignore[no-any-return]

    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    default = tuple(str(mode.device) for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext))
    return (autocast, default, *map(value, _SETTINGS))


# The module.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_ITEMS = 100
_EMPTY = CellType()


class _ModuleState:
    """A module as it is captured: its parts, tensors, hooks and plain attributes.

    Attributes:
        parameters: Distinct parameters, by id.
        tensors: Buffers and tensors in plain attributes, by id.
        aliases: A stand-in for each parameter, by its id: the same memory, but a leaf of its own. A captured backward
            ends at these leaves. So it neither runs hooks that belong to the parameters, which run outside, nor waits
            for the streams of gradient accumulators that others made and keep, such as DDP.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        named = list(module.named_modules())
        self._names = [name for name, _ in named]
        self._parts = [part for _, part in named]
        self._kinds = [_kind_of(part) for part in self._parts]
        self._children = [part._modules for part in self._parts]
        self._child_ids = self._ids_of_children()
        self._hooks = [getattr(part, name) for part in self._parts for name in _HOOKS]
        self.parameters = {id(p): p for part in self._parts for p in part._parameters.values() if p is not None}
        self._places = [(name, table, key, t, _place_of(t)) for name, table, key, t in self._own_tensors()]
        self.tensors = {id(t): t for _, _, _, t, _ in self._places if id(t) not in self.parameters}
        for part in self._parts:
            for key, value in vars(part).items():
                if type(value) in (list, tuple, dict) and key not in _OF_EVERY_MODULE:
                    self.tensors |= {id(t): t for t in tensors_in(value) if id(t) not in self.parameters}
        self._trained = [p.requires_grad for p in self.parameters.values()]
        self.aliases = {
            key: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for key, parameter in self.parameters.items()
        }
        self._attributes = self._read()

    def _own_tensors(self) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
        for path, part in zip(self._names, self._parts, strict=True):
            for table in (part._parameters, part._buffers, vars(part)):
                for key, value in table.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{path}.{key}".strip("."), table, key, value

    def _ids_of_children(self) -> list[int]:
        return [id(child) for children in self._children for child in children.values()]

    def _read(self) -> list[tuple[str, Callable[[], Any], Any]]:
        """Returns what Python decides by in the module: for each piece its name, its reader, and its present value."""
        readers: dict[Any, tuple[str, Callable[[], Any]]] = {"context": ("a context variable", _context_variables)}
        for path, part in zip(self._names, self._parts, strict=True):
            readers[id(part)] = (f"an attribute of {path or 'the module'}", partial(_values, vars(part)))
            for key, value in vars(part).items():
                is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type, torch.Tensor))
                if is_object and not callable(value):
                    name = f"{path}.{key}".strip(".")
                    readers[id(value)] = (f"an attribute of {name}", partial(_values, vars(value)))
                elif isinstance(value, FunctionType):
                    readers[value] = (f"a variable that {value.__qualname__} names", partial(_named_by, value))
        for kind in {kind for part in self._parts for kind in type(part).__mro__ if kind not in nn.Module.__mro__}:
            if not kind.__module__.startswith("torch."):
                readers[kind] = (f"an attribute of the class {kind.__name__}", partial(_values, vars(kind)))
                for function in [value for value in vars(kind).values() if isinstance(value, FunctionType)]:
                    name = f"a variable that {function.__qualname__} names"
                    readers[function] = (name, partial(_named_by, function))
        return [(name, reader, reader()) for name, reader in readers.values()]

    def check(self) -> None:
        """Raises RefusalError if no call of the module can be captured."""
        for path, part in zip(self._names, self._parts, strict=True):
            if any(getattr(part, name) for name in _HOOKS):
                raise RefusalError(f"it has a hook on {path or 'itself'!r}, which a replay would not call")
            if parametrize._cache_enabled and parametrize.is_parametrized(part):
                raise RefusalError(
                    "it is called inside parametrize.cached(), and a replay would not compute its cached weights"
                )
            if isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1 and part.training:
                name = repr(path) if path else "it"
                raise RefusalError(f"{name} draws dropout from numbers that cuDNN keeps, which a try would move on")
        if _has_global_hooks():
            raise RefusalError("there are hooks on all modules, which a replay would not call")
        for name, _, _, tensor, _ in self._places:
            if type(tensor) not in _PLAIN_TENSORS:
                raise RefusalError(f"its {name!r} is a {type(tensor).__name__}, not a plain tensor")
            if tensor.device != self._device:
                raise RefusalError(f"its {name!r} is on {tensor.device}, not on {self._device}")

    def is_replaced(self) -> bool:
        """Whether memory that a capture uses was replaced, so that the capture can never be right again."""
        return self._child_ids != self._ids_of_children() or any(
            table.get(key) is not tensor or _place_of(tensor) != place for _, table, key, tensor, place in self._places
        )

    def change(self) -> str | None:
        """Returns a difference from the captured module, other than replaced memory, or None."""
        if self._trained != [p.requires_grad for p in self.parameters.values()]:
            return "a parameter began or ceased to require a gradient"
        if any(self._hooks) or _has_global_hooks():
            return "it got a hook"
        if self._kinds != [_kind_of(part) for part in self._parts]:
            return "a part got another class or forward"
        return next((f"{name} changed" for name, reader, value in self._attributes if reader() != value), None)

    @contextmanager
    def with_aliases(self) -> Iterator[None]:
        """Puts the stand-ins for parameters in place inside the block."""
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for part in self._parts:
                for name, parameter in list(part._parameters.items()):
                    if parameter is not None and id(parameter) in self.aliases:
                        swapped.append((part, name, parameter))
                        setattr(part, name, self.aliases[id(parameter)])  # RNNs keep lists up to date in __setattr__
            yield
        finally:
            for part, name, parameter in reversed(swapped):
                setattr(part, name, parameter)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Gives tensors, random numbers and Python attributes back what they had before the block."""
        objects = Objects(self._module)
        contents = [(tensor.data, tensor.detach().clone()) for tensor in self.tensors.values()]
        with forked(self._device):
            try:
                yield
            finally:
                for tensor, before in contents:
                    tensor.copy_(before)
                objects.restore()


def _kind_of(part: nn.Module) -> tuple[type, Any]:
    return type(part), getattr(type(part), "forward", None)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor lies, and how."""
    address = 0 if nn.parameter.is_lazy(tensor) else tensor.data_ptr()
    return () if not address else (address, tensor.dtype, tensor.shape, tensor.stride())


def _has_global_hooks() -> bool:
    return any(getattr(nn.modules.module, f"_global{name}", None) for name in _HOOKS)


def _context_variables() -> Any:
    return {variable: _value(value) for variable, value in contextvars.copy_context().items()}


def _named_by(forward: FunctionType) -> Any:
    """Returns the values of the globals and enclosed variables that a function names."""
    known, code = forward.__globals__, forward.__code__
    enclosed = [cell.cell_contents for cell in forward.__closure__ or () if cell != _EMPTY]
    return [_value(known[name]) for name in code.co_names if name in known], [_value(value) for value in enclosed]


def _values(attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what can be compared of attributes: plain values by value, small containers by content, others by id."""
    return tuple([(key, _value(value)) for key, value in attributes.items() if key not in _OF_EVERY_MODULE])


def _value(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, PLAIN_TYPES):
        return (kind, value)
    if kind in (list, tuple) and len(value) <= _MAX_ITEMS:
        return (kind, [_value(item) for item in value])
    if kind is dict and len(value) <= _MAX_ITEMS:
        return (kind, [(key, _value(item)) for key, item in value.items()])
    if kind in (set, frozenset) and len(value) <= _MAX_ITEMS:
        return (kind, frozenset(value))
    return (id(value), len(value)) if kind in _CONTAINERS else id(value)


# Trial runs.


def _try_out(inputs: _Inputs, static: list[torch.Tensor], state: _ModuleState, api: StreamApi) -> None:
    """Runs a call forward and backward on the current stream.

    Raises:
        RefusalError: It does something that a graph cannot do.
    """
    device = api.device
    leaves = [*static, *state.aliases.values()]
    others, on_host, on_device = python_state(), torch_state(CPU), torch_state(device)
    for trial in range(NUM_TRIALS):
        watch = CaptureWatch(device, static, [*leaves, *state.tensors.values()]) if trial == 0 else None
        with _as_captured(state), watch or nullcontext():
            result = inputs.run_on(static)
        if watch is not None and watch.obstacle is not None:
            raise RefusalError(watch.obstacle)
        _check_result(result, leaves, device)
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad and not tensor.is_leaf]
        if outputs:
            with torch.autocast(device.type, enabled=False):  # as it is captured, and as backwards run
                torch.autograd.grad(
                    outputs,
                    [leaf for leaf in leaves if leaf.requires_grad],
                    [torch.ones_like(tensor) for tensor in outputs],
                    allow_unused=True,
                )
        if state.is_replaced():
            raise RefusalError("it replaced a tensor or a submodule of its own in the call itself")
        change = state.change()
        if change is not None:
            raise RefusalError(f"{change} in the call itself", lasting=False)  # once may be to keep it for later calls
    if not others.is_same(python_state()):
        raise RefusalError("it draws from Python's or numpy's random numbers")
    if device.type != "cpu" and not on_host.is_same(torch_state(CPU)):
        raise RefusalError("it draws random numbers on the CPU")
    if not api.draws_apart and not on_device.is_same(torch_state(device)):
        raise RefusalError(
            "it draws random numbers, whose seed and offset all graphs of a device read from one place before torch "
            f"2.13 (this is {torch.__version__}), so that one replay may overwrite them under another"
        )


@contextmanager
def _as_captured(state: _ModuleState) -> Iterator[None]:
    """Puts stand-ins for parameters in place, and keeps autocast from keeping cast weights for later calls."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with state.with_aliases(), as_lane():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def _check_result(result: Any, known: list[torch.Tensor], device: torch.device) -> None:
    for leaf in flatten(result)[0]:
        if is_opaque(leaf):
            raise RefusalError(f"it returns a {type(leaf).__name__}, which may hide tensors")
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, nn.Parameter):
            raise RefusalError(f"it returns a {type(leaf).__name__}, not a plain tensor")
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise RefusalError(f"it returns a tensor on {leaf.device}")
    leaves, names = _leaves_behind(tensors_in(result))
    strange = leaves.keys() - {id(tensor) for tensor in known}
    if strange:
        shape = _shape(leaves[min(strange)])
        raise RefusalError(f"its result depends on a {shape} leaf that is neither an argument nor a parameter of it")
    if any("Checkpoint" in name for name in names):
        raise RefusalError("it uses activation checkpointing")


def _leaves_behind(tensors: Iterable[torch.Tensor]) -> tuple[dict[int, torch.Tensor], set[str]]:
    """Returns the leaves that gradients of tensors reach, by id, and the names of the operators between."""
    leaves = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
    names: set[str] = set()
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        names.add(node.name())
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        todo += following
    return leaves, names


_READS_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONSTANTS = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")
_COPIES = ("aten::_to_copy", "aten::copy_")


class CaptureWatch(TorchDispatchMode):
    """Finds, operator by operator, why a call could not be replayed.

    Args:
        device: The device of its tensors.
        inputs: Tensors that it is called with; not to be written to.
        own: These, and parameters, buffers and other tensors of its module.

    Attributes:
        obstacle: The first reason, or None.
    """

    def __init__(self, device: torch.device, inputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.obstacle: str | None = None
        self._device = device
        self._inputs = _storages(inputs)
        self._known = _storages(own)
        self._hooks = saved_tensor_hooks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator unchanged, unless that might change what cannot be put back."""
        kwargs = kwargs or {}
        self._refuse(self._reason(func, args, kwargs))
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        self._known |= _storages(outputs)
        self._refuse(self._crossing(func, _tensors((args, kwargs)), outputs))
        return result

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            self.obstacle = self.obstacle or reason  # noted as well: the call may swallow the error
            raise RefusalError(self.obstacle)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if any(tag in func.tags for tag in _READS_BACK):
            return f"it needs a value back from the device in the middle ({func})"
        if saved_tensor_hooks() != self._hooks:
            return "it uses activation checkpointing or other hooks on saved tensors"
        if kwargs.get("generator") is not None:
            return "it draws random numbers from a generator of its own"
        if self._inputs & _storages(_tensors(list(written_arguments(func, args, kwargs)))):
            return f"it writes into one of its inputs ({func})"
        if func.name().split(".")[0] in _CONSTANTS:
            return None
        strange = [tensor for tensor in self._on_device(args, kwargs) if not _storages([tensor]) & self._known]
        if strange:
            return f"it reads a {_shape(strange[0])} tensor that is neither an argument nor its module's own ({func})"
        return None

    def _crossing(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str | None:
        """Returns how an operator copies between the device and memory that the device cannot reach, or None."""
        name, here = func.name().split(".")[0], self._device.type
        if "attention" in name:  # outside of a capture it returns its seed and offset on the CPU
            return None
        elsewhere = next((tensor.device for tensor in outputs if tensor.device.type != here), None)
        if elsewhere is not None and self._on_device(inputs):
            return f"it copies a tensor to {elsewhere} in the middle ({func})"
        if here == "cpu" or elsewhere is not None or name not in _COPIES:
            return None
        pageable = any(tensor.is_cpu and not tensor.is_pinned() for tensor in inputs)
        return f"it copies a tensor from memory that is not pinned in the middle ({func})" if pageable else None

    def _on_device(self, *arguments: Any) -> list[torch.Tensor]:
        return [tensor for tensor in _tensors(arguments) if tensor.device.type == self._device.type]


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


# Capture and replay.


class _Pass:
    """One forward by replay, until its backward is over or its results are gone."""

    spent = False


class _Capture:
    """One kind of call of one module: static memory, the graphs that use it, and the autograd graph of the capture.

    Static memory is written by one replay and read by its backward; ``ModuleGraphs`` replays again only after both. All
    of it is used on the lane's stream, or on a stream that the lane was ordered before and after.

    Args:
        key: Equal for calls that it can replay, while ``state`` is unchanged.
        call: The call that is captured.
        state: The module.
        static: Leaves that the graph reads its inputs from.
        api: The runtime.
    """

    def __init__(
        self, key: Hashable, call: GraphCall, state: _ModuleState, static: list[torch.Tensor], api: StreamApi
    ) -> None:
        self.key = key
        self.name = call.name
        self.state = state
        self.lane = call.lane
        self.differentiable: tuple[int, ...] = ()
        self.is_differentiated_twice = False
        self._api = api
        self._static = static
        self._memory = [tensor.data for tensor in static]  # writing through .data leaves autograd's versions alone
        self._inputs: _Inputs | None = None
        self._made: list[torch.Tensor] = []
        self._outputs: list[tuple[str, Any]] = []
        self._spec: pytree.TreeSpec | None = None
        self._targets: list[torch.Tensor] = []
        self._sources: list[int | nn.Parameter] = []
        self._static_grads: list[torch.Tensor] = []
        self._grads: Sequence[torch.Tensor | None] = ()
        self._graphs: list[Any] = []
        self._latest: weakref.ref[_Pass] | None = None
        self._closed = False

    def record(self, inputs: _Inputs) -> None:
        """Captures the forward in one graph and the backward in another.

        Each graph has a memory pool of its own: sharing one is "safe if you know you'll replay those graphs in the same
        order you captured them" (ATen/cuda/CUDAGraph.h), and backwards may be at once or in another order.
        """

        def forward() -> None:
            with self.lane.under_settings(), _as_captured(self.state):
                self._take_outputs(inputs.run_on(self._static))

        def backward() -> None:
            with self.lane.under_settings():
                self._grads = self._backward_of(list(range(len(self.differentiable))), self._static_grads)

        self._inputs = inputs
        self._graphs = [self._captured(forward)]
        if self._targets:
            self._static_grads = [torch.zeros_like(self._made[index].detach()) for index in self.differentiable]
            self._graphs.append(self._captured(backward))

    def _captured(self, launch: Callable[[], None]) -> Any:
        graph = self._api.new_graph()
        causes: list[Exception] = []
        self._api.synchronize()
        self._api.release_workspaces()  # made outside of the pool, they would be used inside of it, and vice versa
        try:
            with self._api.capture(graph, stream=self.lane.stream, pool=self._api.new_graph_pool()):
                try:
                    launch()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception as error:  # of what failed first, not of the end of a capture that failed
            raise (causes[0] if causes else error) from None
        finally:
            self._api.synchronize()
            self._api.release_workspaces()
        return graph

    def _take_outputs(self, result: Any) -> None:
        """Notes what the captured call returned and which leaves its gradients reach."""
        leaves, self._spec = flatten(result)
        inputs = {id(static): number for number, static in enumerate(self._static)}
        own: dict[int, torch.Tensor] = dict(self.state.tensors)
        own |= {id(alias): self.state.parameters[key] for key, alias in self.state.aliases.items()}
        numbers: dict[int, int] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self._outputs.append(("value", leaf))
            elif id(leaf) in inputs:
                self._outputs.append(("input", inputs[id(leaf)]))
            elif id(leaf) in own:
                self._outputs.append(("value", own[id(leaf)]))
            else:
                number = numbers.setdefault(id(leaf), len(self._made))
                if number == len(self._made):
                    self._made.append(leaf)
                self._outputs.append(("made", number))
        self.differentiable = tuple(index for index, tensor in enumerate(self._made) if tensor.requires_grad)
        reached, _ = _leaves_behind([self._made[index] for index in self.differentiable])
        sources: list[tuple[torch.Tensor, int | nn.Parameter]] = [
            *((static, number) for number, static in enumerate(self._static)),
            *((alias, self.state.parameters[key]) for key, alias in self.state.aliases.items()),
        ]
        for leaf, source in sources:
            if id(leaf) in reached:
                self._targets.append(leaf)
                self._sources.append(source)

    # Forward.

    @property
    def in_flight(self) -> bool:
        """Whether a forward by replay still waits for its backward, whose memory a replay would overwrite."""
        latest = self._latest() if self._latest is not None else None
        return latest is not None and not latest.spent

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Launches a forward on the current stream, that of the lane; returns its result."""
        with torch.no_grad():
            for memory, tensor in zip(self._memory, tensors, strict=True):
                memory.copy_(tensor)
                self._api.record_use(tensor, self.lane.stream)
        self._graphs[0].replay()
        if self._targets and torch.is_grad_enabled():
            passed = _Pass()
            self._latest = weakref.ref(passed)
            sources = [tensors[source] if isinstance(source, int) else source for source in self._sources]
            made = _Replayed.apply(self, passed, *sources)
        else:
            made = self.results()
        values = {"made": made, "input": tensors}
        assert self._spec is not None
        return unflatten(
            [value if kind == "value" else values[kind][value] for kind, value in self._outputs], self._spec
        )

    def results(self) -> list[torch.Tensor]:
        """Returns copies of what the forward computed."""
        return _copies([tensor.detach() for tensor in self._made])

    # Backward.

    def backward(self, passed: _Pass, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Launches the backward behind what the present stream was given, and orders that stream after it.

        By replay, if all differentiable results have a gradient. If some have none, autograd goes through the graph of
        the capture, whose activations are those of the latest replay.
        """
        self._check_open()
        if passed.spent:
            raise RuntimeError(
                f"trying to go backward a second time through {self.name!r}, whose activations may be overwritten by "
                "now; specify retain_graph=True for the first time"
            )
        passed.spent = not torch._C._autograd._get_current_graph_task_keep_graph()
        chosen = [number for number, index in enumerate(self.differentiable) if gradients[index] is not None]
        grads = [gradients[self.differentiable[number]] for number in chosen]

        def launch() -> list[torch.Tensor | None]:
            for grad in grads:
                self._api.record_use(grad, self.lane.stream)  # type: ignore[arg-type]  # none of them is None
            if len(chosen) < len(self.differentiable):
                return list(self._backward_of(chosen, grads))
            torch._foreach_copy_(self._static_grads, grads)  # type: ignore[arg-type]
            self._graphs[1].replay()
            copied = iter(_copies([grad for grad in self._grads if grad is not None]))
            return [None if grad is None else next(copied) for grad in self._grads]

        return self.lane.launch(launch, timed=False).wait()

    def _backward_of(self, chosen: Sequence[int], grads: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Goes backward from some of the differentiable results; None for leaves that no gradient reaches."""
        if not chosen:
            return [None] * len(self._targets)
        outputs = [self._made[self.differentiable[number]] for number in chosen]
        with torch.autocast(self._api.device.type, enabled=False):
            return torch.autograd.grad(outputs, self._targets, list(grads), allow_unused=True, retain_graph=True)

    def backward_twice(
        self, autocast: torch.dtype | None, sources: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Makes the call again, eagerly, and goes backward through that, so that gradients have gradients."""
        self._check_open()
        self.is_differentiated_twice = True
        assert self._inputs is not None
        tensors, device = list(self._static), self._api.device
        for place, source in zip(self._sources, sources, strict=True):
            if isinstance(place, int):
                tensors[place] = source
        context = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
        with self.state.without_trace(), context, as_lane():
            before = torch_state(device)
            leaves = flatten(self._inputs.run_on(tensors))[0]
            if not before.is_same(torch_state(device)):
                raise MosaicError(
                    f"{self.name!r} draws random numbers in a CUDA graph, which has no gradients of gradients "
                    "(create_graph=True); colocate with Options(cuda_graphs=False)"
                )
        made = {value: leaf for (kind, value), leaf in zip(self._outputs, leaves, strict=True) if kind == "made"}
        chosen = [index for index in self.differentiable if gradients[index] is not None]
        if not chosen:
            return [None] * len(sources)
        grads = [gradients[index] for index in chosen]
        return torch.autograd.grad(
            [made[index] for index in chosen], sources, grads, create_graph=True, allow_unused=True
        )

    def _check_open(self) -> None:
        if self._closed:
            raise MosaicError(f"the graphs of {self.name!r} are closed; run backward before closing them")

    def close(self) -> None:
        """Lets graphs and memory go; the device must have come to rest."""
        self._closed = True
        for graph in self._graphs:
            graph.reset()
        for memory in (self._graphs, self._made, self._static, self._static_grads, self._memory, self._targets):
            memory.clear()
        self._grads = ()


class _Replayed(torch.autograd.Function):
    """A captured call in the caller's autograd graph: inputs and parameters in, results out."""

    @staticmethod
    def forward(ctx: Any, capture: _Capture, passed: _Pass, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.capture, ctx.passed = capture, passed
        kind = capture.lane.api.device.type
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        made = tuple(capture.results())
        ctx.mark_non_differentiable(*(t for index, t in enumerate(made) if index not in capture.differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            return (None, None, *ctx.capture.backward_twice(ctx.autocast, ctx.saved_tensors, gradients))
        return (None, None, *ctx.capture.backward(ctx.passed, gradients))


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies, made by few kernels: a launch for each parameter would cost more than it copies."""
    copied: list[torch.Tensor] = []
    grouped: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for tensor in tensors:
        if tensor.is_contiguous():
            copied.append(torch.empty_like(tensor))
            grouped[tensor.dtype][0].append(copied[-1])
            grouped[tensor.dtype][1].append(tensor)
        else:
            copied.append(tensor.clone())
    for into, source in grouped.values():
        torch._foreach_copy_(into, source)
    return copied
