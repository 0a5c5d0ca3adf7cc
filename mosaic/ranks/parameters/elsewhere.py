"""Parameters only where they are used: other ranks have stand-ins, which raise where a value is read.

A plain meta tensor would not do: torch lets ``cpu.add_(meta)`` pass without doing anything, and ``torch.save`` writes
meta tensors. A stand-in has a shape, a type and no memory. Shapes, flags, hooks and ``grad`` are those of any tensor.
Of the operators

* those that write into a stand-in do nothing: the ranks that have the values do it with them;
* those on stand-ins, and numbers, return stand-ins;
* all others raise: those that mix a stand-in with values of this rank, and those that read its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.errors import ModuleContractError
from mosaic.find.structure import tensors_in
from mosaic.parts.weights import swap, swappable

_USERS_NAMES = {"_local_scalar_dense": "item", "_to_copy": "to"}


@dataclass(frozen=True, slots=True)
class Home:
    """The ranks that have the values of a module."""

    name: str
    """The placed module."""
    ranks: tuple[int, ...]
    """Those that hold its parameters."""
    remedy: str = ""
    """The remedy that an error names; empty for that of a colocated model."""

    def __str__(self) -> str:
        return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Elsewhere, *_: Any, **__: Any) -> NoReturn:
        self.refuse(name)

    return method


class Elsewhere(torch.Tensor):
    """A tensor whose values are on other ranks.

    Attributes:
        home: Where its values are.
    """

    home: Home
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    @staticmethod
    def of(like: torch.Tensor, home: Home, *, is_parameter: bool = False) -> Elsewhere:
        """Returns one on the meta device."""
        result: Elsewhere = torch.Tensor._make_wrapper_subclass(
            Elsewhere,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=torch.device("meta"),
            requires_grad=like.requires_grad and is_parameter,
        )
        result.home = home
        if is_parameter:
            result._is_param = True  # what isinstance(..., nn.Parameter) asks
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is declared as a builtin
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator with a stand-in among its arguments."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if written and all(isinstance(tensor, Elsewhere) for tensor in tensors_in(written)):
            if len(func._schema.returns) < 2:
                return written[0] if func._schema.returns else None
            return tuple(written)
        if written and func.__name__.startswith("_foreach_"):
            return _foreach(func, args, kwargs)
        operands = tensors_in((args, kwargs))
        here = next(tensor for tensor in operands if isinstance(tensor, Elsewhere))
        if written or any(not isinstance(t, Elsewhere) and (t.dim() or t.requires_grad) for t in operands):
            here.refuse(func)
        plain_args, plain_kwargs = pytree.tree_map_only(Elsewhere, _without_values, (tuple(args), kwargs))
        try:
            result = func(*plain_args, **plain_kwargs)
        except (RuntimeError, TypeError) as error:  # NotImplementedError is one of the former
            if "meta" not in str(error).lower():
                raise
            here.refuse(func)
        return pytree.tree_map_only(torch.Tensor, lambda t: Elsewhere.of(t, here.home) if t.is_meta else t, result)

    def refuse(self, func: Any) -> NoReturn:
        """Raises ModuleContractError: something needs the values."""
        name = func if isinstance(func, str) else func.__name__.partition(".")[0]
        remedy = self.home.remedy or (
            "handle.full_state_dict(), called on every rank, has the whole model's; handle.save() and handle.export() "
            "write them. A sum over parameters in a loss is the optimizer's weight_decay, or belongs into the module's "
            f"own forward. colocate(..., exclude=[{self.home.name!r}]) leaves the module whole on every rank"
        )
        raise ModuleContractError(
            f"{_USERS_NAMES.get(name, name)}() needs values of {self.home.name!r}, which are on {self.home} only. "
            f"{remedy}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # no tensor_contents here
        return f"Elsewhere({tuple(self.shape)}, {self.dtype}, {self.home.name!r} on {self.home})"

    def __format__(self, text: str) -> str:
        return self.refuse("format") if text else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Elsewhere:
        if id(self) not in memo:
            memo[id(self)] = Elsewhere.of(self, self.home, is_parameter=getattr(self, "_is_param", False))
        copied: Elsewhere = memo[id(self)]
        return copied

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Elsewhere):
            self.refuse("data.copy_")
        torch._C.TensorBase.data.__set__(self, value)  # type: ignore[attr-defined]

    def new(self, *size: Any, **_: Any) -> Any:
        return self.new_empty(*size)

    def type(self, dtype: Any = None, **more: Any) -> Any:  # type: ignore[override]
        """Returns the name of its type as of any tensor in host memory, for those who want all parameters alike."""
        return torch.empty(0, dtype=self.dtype).type() if dtype is None else super().type(dtype, **more)

    __reduce_ex__, numpy, __array__, tolist = map(_refusing, ("pickle", "numpy", "numpy", "tolist"))  # type: ignore[assignment]


def _without_values(tensor: Elsewhere) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operator writes into."""
    values = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in values if value is not None]


def _foreach(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs an operator on lists that writes into some tensors of this rank and into some stand-ins."""
    into = args[0]
    here = [place for place, tensor in enumerate(into) if not isinstance(tensor, Elsewhere)]

    def chosen(value: Any) -> Any:
        return [value[place] for place in here] if isinstance(value, list) and len(value) == len(into) else value

    operands, named = tuple(map(chosen, args)), {name: chosen(value) for name, value in kwargs.items()}
    for tensor in tensors_in((operands, named)):
        if isinstance(tensor, Elsewhere):
            tensor.refuse(func)
    func(*operands, **named)


def give_up(module: nn.Module, home: Home, *, keep: Collection[int] = ()) -> None:
    """Frees a module's parameters and buffers on a rank that does not run it, except for those in ``keep``, by id.

    The parameters stay the same objects, so an optimizer that has them keeps them; without gradients it skips them.
    """

    def goes(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
        return tensor is not None and not tensor.is_meta and id(tensor) not in keep

    with swappable(module):
        for part in module.modules():
            parameters = [parameter for parameter in part._parameters.values() if goes(parameter)]
            buffers = {name: buffer for name, buffer in part._buffers.items() if goes(buffer)}
            for parameter in parameters:
                torch.utils.swap_tensors(parameter, Elsewhere.of(parameter, home, is_parameter=True))
            part._buffers.update({name: Elsewhere.of(buffer, home) for name, buffer in buffers.items()})
            if parameters or buffers:
                part.register_forward_pre_hook(GivenUp(home))


def take_back(model: nn.Module, whole: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Gives every part of a model what it was without; the parameters stay the same objects."""
    with swappable(model):
        for path, tensor in tensors_of(model):
            values = whole(path, tensor)
            if tensor.is_meta and isinstance(tensor, nn.Parameter):
                swap(tensor, values)
            elif tensor.is_meta:
                prefix, _, name = path.rpartition(".")
                model.get_submodule(prefix)._buffers[name] = values
    for part in model.modules():
        for key in [key for key, hook in part._forward_pre_hooks.items() if isinstance(hook, GivenUp)]:
            del part._forward_pre_hooks[key]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Refuses calls of what has no parameters here: a part that the loop calls itself, or a copy of the model."""

    home: Home

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise ModuleContractError(
            f"the parameters of {self.home.name!r} are on {self.home} only, so that it cannot run here: neither a part "
            "of it alone, nor a copy of the model, nor the model within handle.disabled(). A copy that runs, on every "
            "rank, comes of handle.full_state_dict(), and of copying after handle.remove()"
        )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's parameters, each once, and all buffers, by name; in one order on all ranks."""
    done: set[int] = set()
    for prefix, part in model.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or id(tensor) in done:
                continue
            if isinstance(tensor, nn.Parameter):  # on all ranks the same objects where it is the same one on any
                done.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, tensor
