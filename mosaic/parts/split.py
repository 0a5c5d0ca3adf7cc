"""The split of a model: its sites, their owners, and the values that cross each cut."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError
from mosaic.graph import Part

_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")


class Value(NamedTuple):
    """One tensor that a site returns."""

    site: int
    leaf: int  # index among the leaves of its result


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call of a layer, or of the outermost module with parameters that holds no layers; the last is the output."""

    path: str  # the called module's name in the model; empty for the output
    call: int = 0  # number of earlier calls of the same module
    module: str  # owner: the site runs with this module's layer
    layer: int
    """Layer of the owner that it runs with: the first for sites before the layers, the last for those after."""
    is_layer: bool = False
    needs: frozenset[Value] = frozenset()
    """Values of other sites that it uses, directly or through operations between modules."""
    parameters: frozenset[str] = frozenset()
    """Parameters that it reads, and those that operations before it read; by their first names in the model."""
    keeps_shape: bool = False  # it returns one tensor, with its first input's shape and dtype
    in_place: bool = False  # it writes its first result into its first input
    refills: int | None = None  # number of the argument, a dict or a list, that it writes into and returns
    has_effects: bool = False
    """True if a run changes arguments or buffers, or draws numbers of numpy or Python: it is not recomputed."""
    may_select: bool = field(default=False, compare=False)
    """True if its backward may run with what selective recomputation keeps."""
    form: Any = field(default=None, repr=False, compare=False)
    """Its result without the tensors, as leaves and a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModule:
    """A list of layers, with the modules around them."""

    name: str
    """Its name in parts."""
    path: str
    """Name of the list in the model."""
    count: int
    """Number of layers."""
    inputs: tuple[str, ...] = ()
    """Tensors of the microbatch that it reads."""
    own_inputs: tuple[str, ...] = ()
    """Tensors that no other module reads: without them it is not called."""


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """Result of one run of a sample. Plain data, equal on all ranks with the same model and sample."""

    modules: tuple[SplitModule, ...]
    """In topological order, otherwise in the order of calls; the model ends in the last."""
    sites: tuple[Site, ...]
    """In the order of calls; the last is the model's output."""
    output_leaves: tuple[str, ...]
    """Leaves of a container output that the last module makes; others become None."""
    written_inputs: tuple[str, ...] = ()
    """Tensors of the microbatch that the model writes into: each chunk has a copy."""
    read_inputs: tuple[str, ...] = ()
    """Tensors of the microbatch that Python reads between sites: they may choose a path."""
    shaping_inputs: frozenset[str] = frozenset()
    """Tensors of the microbatch whose values may determine shapes between sites."""
    dependent: frozenset[str] = frozenset()
    """Modules whose units depend on each other: they take whole microbatches."""
    idle_parameters: Mapping[str, str]
    """Parameters that the sample did not reach, with the module that keeps them."""
    kind: Hashable = ()
    """Kind of the sample; see ``kind_of``."""

    @cached_property
    def by_name(self) -> dict[str, SplitModule]:
        return {module.name: module for module in self.modules}

    @cached_property
    def feeds(self) -> tuple[tuple[str, str], ...]:
        """Pairs of modules: values of the first reach the second."""
        pairs = ((self.sites[v.site].module, site.module) for site in self.sites for v in sorted(site.needs))
        return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))

    @cached_property
    def encoders(self) -> frozenset[str]:
        """Modules with their own tensors that feed others and read no module: they can be cut into pieces."""
        own = {module.name for module in self.modules if module.own_inputs}
        fed = {target for _, target in self.feeds}
        return frozenset(own & {source for source, _ in self.feeds} - fed - self.dependent)

    @cached_property
    def unreached(self) -> tuple[str, ...]:
        """Modules with parameters that the sample did not call."""
        paths = dict.fromkeys(name.rpartition(".")[0] for name in self.idle_parameters)
        return tuple(path for path in paths if path and not any(s.path.startswith(f"{path}.") for s in self.sites))

    @cached_property
    def _consumers(self) -> dict[Value, list[tuple[str, int]]]:
        consumers: dict[Value, list[tuple[str, int]]] = {}
        for site in self.sites:
            for value in site.needs:
                consumers.setdefault(value, []).append((site.module, site.layer))
        return dict(sorted(consumers.items()))

    @cached_property
    def sent_sites(self) -> frozenset[int]:
        """Sites of whose results other layers need some."""
        owners = [{(site.module, site.layer)} for site in self.sites]
        return frozenset(value.site for value, users in self._consumers.items() if owners[value.site] != {*users})

    def carried(self, module: str, layer: int) -> tuple[Value, ...]:
        """Returns the values that a part beginning at this layer, above 0, needs from the part before it.

        The module's own values that any later site needs, and values of other modules that its later layers need:
        they pass through the module's parts.
        """
        return tuple(value for value, users in self._consumers.items() if self._crosses(value, users, module, layer))

    def _crosses(self, value: Value, users: list[tuple[str, int]], module: str, layer: int) -> bool:
        source = self.sites[value.site]
        if source.module == module and source.layer >= layer:
            return False
        needed = any(user == module and at >= layer for user, at in users)
        return needed or (source.module == module and any(user != module for user, _ in users))

    def exits(self, module: str) -> tuple[Value, ...]:
        """Returns the values that a module's last part sends to other modules."""
        return tuple(
            value
            for value, users in self._consumers.items()
            if self.sites[value.site].module == module and any(user != module for user, _ in users)
        )

    def entries(self, chunk: Sequence[Part]) -> dict[str, tuple[Value, ...]]:
        """Returns the values that a chunk receives, by the sending module."""
        received: dict[str, tuple[Value, ...]] = {}
        inside = {(part.module, part.end == part.total) for part in chunk}
        for part in chunk:
            if part.first:
                received[part.module] = self.carried(part.module, part.first)
                continue
            for source, target in self.feeds:
                if target == part.module and (source, True) not in inside:
                    received[source] = self.exits(source)
        return received

    def leaves(self, chunk: Sequence[Part]) -> dict[str, tuple[Value, ...]]:
        """Returns the values that a chunk sends, by module; the last chunk sends none."""
        sent: dict[str, tuple[Value, ...]] = {}
        begins = {part.module for part in chunk if not part.first}
        for part in chunk:
            if part.end < part.total:
                sent[part.module] = self.carried(part.module, part.end)
            elif any(source == part.module and target not in begins for source, target in self.feeds):
                sent[part.module] = self.exits(part.module)
        return sent

    def handed(self, source: Sequence[Part], target: Sequence[Part]) -> tuple[str, ...]:
        """Returns the modules whose tensors one chunk sends to another, in order.

        A chunk receives a module's tensors from the part before its own; a chunk without such a part, from the last.
        """
        before = {part.module: part.first for part in target if part.first}
        ends = {part.module: part for part in source}
        return tuple(
            name
            for name in self.entries(target)
            if name in ends and ends[name].end == before.get(name, ends[name].total)
        )

    def sites_of(self, chunk: Sequence[Part]) -> frozenset[int]:
        """Returns the indices of the sites that run in a chunk."""
        own = {part.module: range(part.first, part.end) for part in chunk}
        return frozenset(i for i, site in enumerate(self.sites) if site.layer in own.get(site.module, ()))

    def present(self, kwargs: Mapping[str, Any]) -> frozenset[str]:
        """Returns the modules that a microbatch calls.

        It omits a module with its own tensors if all of them are missing, and a module without any if all its sources
        are omitted, but never the last.
        """
        called: set[str] = set()
        for module in self.modules:
            sources = {source for source, target in self.feeds if target == module.name}
            has_inputs = any(_has_data(kwargs.get(name)) for name in module.own_inputs)
            fed = not module.own_inputs and (not sources or sources & called)
            if has_inputs or fed or module is self.modules[-1]:
                called.add(module.name)
        return frozenset(called)

    def parameters_of(self, chunk: Sequence[Part]) -> frozenset[str]:
        names: set[str] = set()
        for index in self.sites_of(chunk):
            names |= self.sites[index].parameters
        last = {part.module for part in chunk if part.end == part.total}
        names |= {name for name, keeper in self.idle_parameters.items() if keeper in last}
        return frozenset(names)

    def shared_parameters(self, chunks: Sequence[Sequence[Part]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns parameters of several chunks, whose gradients are summed, with these chunks."""
        users: dict[str, list[int]] = {}
        for index, chunk in enumerate(chunks):
            for name in self.parameters_of(chunk):
                users.setdefault(name, []).append(index)
        return tuple((name, tuple(own)) for name, own in sorted(users.items()) if len(own) > 1)

    def copied(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a microbatch with copies of the tensors that the model writes into."""
        return {name: copied(value) if name in self.written_inputs else value for name, value in kwargs.items()}


def _has_data(value: Any) -> bool:
    """Returns True for an argument with data; a mapping of tensors without rows, such as a tower's, has none."""
    tensors = list(value.values()) if isinstance(value, Mapping) else []
    are_rows = bool(tensors) and all(isinstance(each, torch.Tensor) and each.ndim for each in tensors)
    return value is not None and not (are_rows and not any(map(len, tensors)))


def copied(value: Any) -> Any:
    """Returns nested containers with copies of their tensors; repeated tensors stay one object."""
    copies: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(torch.Tensor, lambda each: copies.setdefault(id(each), each.clone()), value)


def check_model(model: nn.Module) -> None:
    """Raises UnsplittableError if a module normalizes over its batch, drops layers at random or hides what it runs."""
    for name, module in model.named_modules():
        rates = {drop: getattr(module, drop, getattr(getattr(module, "config", None), drop, 0.0)) for drop in _DROPS}
        drops = [f"{drop}={rate}" for drop, rate in rates.items() if isinstance(rate, float) and rate > 0]
        hooked = [weight for weight in vars(module) if f"{weight}_orig" in module._parameters]
        if isinstance(module, _BatchNorm) and module.training:
            reason = f"is a {type(module).__name__}; use GroupNorm or LayerNorm, or call eval() after each train()"
        elif drops and module.training:
            reason = f"skips layers at random ({drops[0]}), which no schedule knows; set {drops[0].split('=')[0]} to 0"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "is compiled by torch.jit, which hides its layers; pass the module that was compiled"
        elif any(map(is_lazy, module.parameters(recurse=False))):
            reason = "has weights without a shape; call the model once before"
        elif hooked:
            reason = f"has a hook that makes its {hooked[0]}; use torch.nn.utils.parametrizations, which are modules"
        elif getattr(module, "gradient_checkpointing", False) is True:
            reason = "has gradient_checkpointing=True; call gradient_checkpointing_disable() and give strategies"
        else:
            continue
        raise UnsplittableError(f"{name or 'the model'} {reason}")
