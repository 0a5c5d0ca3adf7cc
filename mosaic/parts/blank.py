"""Results of modules that do not run: zeros of their shape, and as many random numbers drawn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import mha
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mosaic.cost.counting.count import quiet_fake_tensors
from mosaic.cost.counting.operators import kind_of
from mosaic.cost.counts import OperatorKind
from mosaic.errors import UnsplittableError, said_by
from mosaic.find.random_numbers import forked, python_state, random_state, torch_state
from mosaic.find.restore import Objects
from mosaic.find.structure import tensors_in
from mosaic.parts.split import copied

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replaces the modules' ``forward``; hooks still run around it."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Has torch's encoders pass plain tensors between layers without gradients, too, in place of nested ones."""
    is_enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(is_enabled)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns a layer's hidden input: the first tensor among its arguments."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)


def without_cache(value: Any) -> Any:
    """Returns an argument, or None for a cache, which the second run of a layer would find full."""
    return None if is_cache(value) else value


def is_cache(value: Any) -> bool:
    """Returns True for a cache of keys and values of transformers; layers may write into no other one."""
    return hasattr(value, "get_seq_length") and type(value).__module__.startswith("transformers.")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    module: nn.Module
    forward: Forward
    """Its own."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def flat(self) -> tuple[list[Any], Any]:
        """Returns the leaves and the tree of its arguments, without caches, which a run would fill."""
        leaves, tree = pytree.tree_flatten((self.args, dict(self.kwargs)), is_leaf=is_cache)
        return list(map(without_cache, leaves)), tree

    def refill(self, place: int, result: Any) -> Any:
        """Puts a result into the argument that the module writes into and returns."""
        argument = (*self.args, *self.kwargs.values())[place]
        argument.clear()
        argument.update(result) if isinstance(argument, dict) else argument.extend(result)
        return argument

    def writable(self) -> list[tuple[Any, Objects]]:
        """Notes dicts, lists and objects among its arguments; transformers' caches have a place for each layer."""
        nodes: list[Any] = []
        pytree.tree_leaves((self.args, self.kwargs), is_leaf=nodes.append)  # type: ignore[arg-type]  # None goes on
        nodes = [node for node in nodes if not (isinstance(node, torch.Tensor | nn.Module | tuple) or callable(node))]
        return [(node, Objects(node)) for node in nodes if not type(node).__module__.startswith("transformers.")]

    def refilled(self, noted: Sequence[tuple[Any, Objects]], result: Any, *, caller: str) -> int | None:
        """Returns the number of the argument that it wrote into and returned; refuses other writes."""
        place = None
        for node, objects in noted:
            is_container = isinstance(node, dict | list)  # an object may note a number, as a cached property does
            writes = ((each is node, old is not None or tensors_in(new)) for each, _, old, new in objects.differences())
            if not any(is_own if is_container else is_kept for is_own, is_kept in writes):
                continue
            own = [at for at, each in enumerate((*self.args, *self.kwargs.values())) if each is node is result]
            if not own:
                raise UnsplittableError(
                    f"{caller}, writes into a {type(node).__name__} among its arguments, which other ranks do not see: "
                    "call the model without it, as with use_cache=False, or return what the layer keeps"
                )
            place = own[0]
        return place


class DrawsSeen(TorchDispatchMode):
    """Records random operators while it is entered.

    Attributes:
        draws: Operators in order, with the leaves of their arguments, tensors without data, and their tree.
        kept: Memory of results that selective recomputation keeps.
        writes_kept: True if an operator writes into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[Any, list[Any], Any]] = []
        self.kept: dict[int, Any] = {}
        self.writes_kept = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random_numbers(func, args, kwargs or {}):
            leaves, tree = pytree.tree_flatten((args, kwargs or {}))
            self.draws.append((func, list(map(_without_data, leaves)), tree))
        if func._schema.is_mutable:
            self.writes_kept |= any(_memory(leaf) in self.kept for leaf in pytree.tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        if is_kept_by_selection(func, args, kwargs or {}):  # held: other memory gets no such number
            self.kept |= {_memory(leaf): leaf for leaf in pytree.tree_leaves(result)}
        return result


def draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if an operator of torch draws random numbers; fused attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    return "dropout_p" not in names or arguments.get("dropout_p", 0.0) != 0.0


_DRAWS_BY_VALUE = ("rrelu_with_noise", "poisson", "_standard_gamma", "_sample_dirichlet", "binomial")


def is_kept_by_selection(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns True for an operator whose result selective recomputation keeps: a product, a convolution, attention.

    One that draws random numbers, such as attention with dropout, runs again: later ones draw behind it.
    """
    return _is_expensive(operator) and not draws_random_numbers(operator, args, kwargs)


@cache
def _is_expensive(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and kind_of(operator) is not OperatorKind.MEMORY


@dataclass(frozen=True, slots=True)
class BlankResult:
    """The result of a call, as a run without data foresees it."""

    leaves: tuple[Any, ...]
    tree: Any
    refills: int | None
    """Number of the argument that it writes into and returns."""
    draws: Sequence[tuple[Any, list[Any], Any]]
    """Random operators; see ``DrawsSeen``."""
    draws_in_python: bool
    """True if the call draws from Python's or numpy's generator."""
    has_effects: bool
    """True if a run changes arguments or buffers, or draws numbers of numpy or Python."""
    may_select: bool
    """True if nothing writes into results that selective recomputation keeps."""
    passed: tuple[int | None, ...]
    """The index of the arguments' leaf that each leaf is, or is a view of."""


class BlankResults:
    """Results of modules by the shapes of arguments, from one run without data.

    A run replaces the modules' weights; in the context ``alone`` no other thread uses them.

    Attributes:
        by_values: Ids of modules whose results depend on values: they run each time.
    """

    def __init__(self, device: torch.device, alone: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._device = device
        self._alone = alone
        self._results: dict[Hashable, BlankResult] = {}
        self.by_values: set[int] = set()
        self._precisions: dict[Hashable, torch.dtype] = {}

    def forget(self) -> None:
        self._results.clear()

    def of(self, call: ModuleCall) -> BlankResult:
        arguments, tree = call.flat()
        cast = torch.is_autocast_enabled(self._device.type) and torch.get_autocast_dtype(self._device.type)
        key = (id(call.module), call.module.training, cast, str(tree), *map(_key, arguments))
        if key in self._results:
            return self._results[key]
        with self._alone(), forked(self._device):
            result = self._run(call)
        if id(call.module) not in self.by_values:
            self._results[key] = result
        return result

    def zeros(self, call: ModuleCall) -> tuple[list[Any], Any]:
        result = self.of(call)
        leaves = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in result.leaves
        ]
        return leaves, result.tree

    def in_precision_of(self, name: str, call: ModuleCall) -> torch.Tensor | None:
        """Returns the hidden input of one of a list's layers in the dtype of its result, other under autocast."""
        hidden = hidden_of(call.args, call.kwargs)
        if hidden is None or not torch.is_autocast_enabled(self._device.type):
            return hidden
        key = (name, torch.get_autocast_dtype(self._device.type), hidden.dtype)
        if key not in self._precisions:
            self._precisions[key] = self.of(call).leaves[0].dtype
        return hidden.to(self._precisions[key])

    @staticmethod
    def refuse_draws_by_value(operator: str, place: str) -> None:
        """Raises UnsplittableError for an operator of which ranks without its values cannot repeat the draws."""
        if operator.startswith(_DRAWS_BY_VALUE):
            raise UnsplittableError(
                f"{place} draws random numbers by {operator}, as many as its values say, which other ranks lack: draw "
                "them in the loop, and pass them as arguments, or take another function, such as leaky_relu"
            )

    def draw(self, call: ModuleCall) -> None:
        """Draws the random numbers of a call, and discards them."""
        result = self.of(call)
        for operator, leaves, tree in result.draws:
            self.refuse_draws_by_value(operator.overloadpacket.__name__, type(call.module).__name__)
            arguments = [self._empty(leaf).fill_(1) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(arguments, tree)
            operator(*args, **kwargs)
        if result.draws_in_python:
            with self._alone():
                self._run(call)

    def _run(self, call: ModuleCall) -> BlankResult:
        """Runs a module without data; if it reads values, with data, and zeros for weights on the meta device."""
        before, arguments = random_state(self._device), call.flat()[0]
        if id(call.module) not in self.by_values:
            try:
                with quiet_fake_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
                    result = _recorded(call, list(map(self._empty, arguments)), self._empty)
            except UnsplittableError:
                raise
            except Exception:  # of any kind: it reads values, or an operator fails without data
                self.by_values.add(id(call.module))
            else:
                if not torch_state(self._device).is_same(replace(before, python=None, numpy=None)):
                    raise UnsplittableError(
                        f"{type(call.module).__name__} seeds torch's generator, and ranks without it cannot repeat "
                        "what is drawn behind it: draw in the loop, and pass the numbers as arguments"
                    )
                return result
        with forked(self._device, python=False):
            try:
                before.restore()
                return _recorded(call, copied(arguments), self._zero)
            except Exception:  # of any kind: some operators need memory of usual strides
                before.restore()
            try:
                return _recorded(call, copied(arguments), partial(self._zero, with_memory=True))
            except Exception as error:  # of any kind: it is the user's code that runs
                raise UnsplittableError(
                    f"what {type(call.module).__name__} returns cannot be foreseen: on a rank without its weights it "
                    f"raises {said_by(error)}; see that it runs with weights of zeros"
                ) from error

    def _zero(self, weight: torch.Tensor, *, is_buffer: bool, with_memory: bool = False) -> torch.Tensor:
        if weight.is_meta:
            weight = torch.zeros((), dtype=weight.dtype, device=self._device).expand(weight.shape)
        if is_buffer:
            return weight.clone(memory_format=torch.contiguous_format)  # the module may write into it
        return weight.contiguous() if with_memory else weight

    def _empty(self, leaf: Any, *, is_buffer: bool = False) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._device)


def _recorded(call: ModuleCall, arguments: list[Any], weight: Callable[..., torch.Tensor]) -> BlankResult:
    """Runs a module with other arguments and weights, and records its effects."""
    weights = {f"inner.{name}": weight(each, is_buffer=False) for name, each in call.module.named_parameters()}
    buffers = {f"inner.{name}": weight(each, is_buffer=True) for name, each in call.module.named_buffers()}
    before, versions = python_state(), _versions([*arguments, *buffers.values()])
    args = pytree.tree_unflatten(arguments, call.flat()[1])
    own = ModuleCall(call.module, call.forward, *args)
    noted = own.writable()
    with torch.no_grad(), DrawsSeen() as seen, _inner_hooks_off(call.module):
        result = functional_call(_Bare(call.module, call.forward), weights | buffers, *args)
    with _disable_current_modes():
        refills = own.refilled(noted, result, caller=f"{type(call.module).__name__}, run without its weights")
    draws_in_python = not before.is_same(python_state())
    leaves, tree = pytree.tree_flatten(result)
    memory = {_memory(each): at for at, each in enumerate(arguments) if isinstance(each, torch.Tensor)}
    return BlankResult(
        leaves=tuple(map(_without_data, leaves)),
        tree=tree,
        refills=refills,
        draws=seen.draws,
        draws_in_python=draws_in_python,
        has_effects=draws_in_python or versions != _versions([*arguments, *buffers.values()]),
        may_select=not seen.writes_kept and not any(_memory(leaf) in seen.kept for leaf in leaves),
        passed=tuple(memory.get(_memory(leaf)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves),
    )


@contextmanager
def _inner_hooks_off(module: nn.Module) -> Iterator[None]:
    """Lets no hook of a module inside see what is computed without data."""
    inner = [part for part in module.modules() if part is not module and part._forward_hooks]
    before = [part._forward_hooks for part in inner]
    for part in inner:
        part._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for part, hooks in zip(inner, before, strict=True):
            part._forward_hooks = hooks


def _memory(leaf: Any) -> int:
    """Returns the identity of a tensor's memory; -1 for other values."""
    return int(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) and not leaf.is_sparse else -1


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


class _Bare(nn.Module):
    """Calls a module's own ``forward``, even while a chunk replaces it."""

    def __init__(self, inner: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.inner = inner
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, int | float | str | None):
        return leaf
    plain = [(name, value) for name, value in getattr(leaf, "__dict__", {}).items() if isinstance(value, bool | float)]
    return (type(leaf).__qualname__, *plain)


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with _disable_current_modes():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
