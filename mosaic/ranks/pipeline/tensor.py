"""Tensor parallelism: several ranks share the layers of a model that was cut and counted whole.

Each rank has its own slice of a matrix, as a plain parameter under its name; torch's DTensor carries activations
between the ranks, and their gradients. ``parallelize_module`` makes DTensors of split weights alone, and torch (2.13)
raises for lists of both kinds in ``GradScaler``, ``foreach`` and ``fused`` optimizers, clipping and buckets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from mosaic.errors import ModuleContractError, UnsplittableError
from mosaic.graph import Part
from mosaic.parts.split import ModelSplit
from mosaic.pipelining.layers import CountedModule, scaled_layer
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_STYLES = (COLWISE, ROWWISE, SUMMED)

MAX_ROUNDINGS = 1e4
"""Most roundings by which outputs of the split and the whole model may differ."""
MAX_DIFFERENCE = 0.1
"""Largest difference as a share of their norm."""
MAX_GRADIENT_DIFFERENCE = 1e-3
"""Of a gradient's norm between ranks that have it whole, as a share; sums in another order differ by less."""

TensorPlan = Mapping[str, str]
"""Styles for patterns of modules' names, such as ``model.layers.*.mlp.up_proj``."""


def share_layers(
    model: nn.Module,
    counted: CountedModel,
    group: dist.ProcessGroup,
    progress: RankProgress,
    *,
    degrees: Mapping[str, int],
    own: Collection[str],
    plan: TensorPlan | None,
    sample: Mapping[str, Any],
) -> tuple[CountedModel, WeightSlices]:
    """Splits weights of layers over the ranks of a group; returns the layers for planning, and this rank's slices.

    ``degrees`` are tensor ranks by module, of which ``own`` are shared by the group; others stay whole here.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsplittableError(
            f"the model is on the meta device, and tensor={max(degrees.values())} ranks share layers of models that "
            "have their weights; make it with weights, or use tensor=1 and more ranks of a pipeline"
        )
    check_draws(counted.numbers.draw(sample))
    styles = styles_of(model, counted.split, plan, degrees)
    divided = _divided(counted, dict(model.named_parameters()), _split_dims(model, styles), degrees)
    with torch.no_grad():
        before = _floats(model(**sample))
        layers = tuple(f"{site.path}." for site in counted.split.sites if site.is_layer and site.module in own)
        slices = WeightSlices(model, styles, layers, group, progress)
        try:
            problem = _difference(before, _floats(model(**sample)))
        except RuntimeError as error:  # of shapes
            problem = str(error)
    if problem:
        listed = ", ".join(f"{name}: {style}" for name, style in list(styles.items())[:8])
        raise UnsplittableError(
            f"the model does not give the same when its layers are split ({problem}): what a colwise module gives has "
            f"to reach a rowwise one, and nothing else; the plan begins with {listed}"
        )
    return divided, slices


def check_draws(draws: bool) -> None:
    """Raises UnsplittableError for a microbatch that draws random numbers."""
    if draws:
        raise UnsplittableError(
            "the model draws random numbers, as dropout does, and tensor ranks would draw others for their slices than "
            "the plain model; set its dropout to 0, or use tensor=1"
        )


def styles_of(
    model: nn.Module, split: ModelSplit, plan: TensorPlan | None, degrees: Mapping[str, int]
) -> dict[str, str]:
    """Returns the style of each split module, by name; refuses plans that fit no module, or that split none evenly."""
    degree_of = {
        f"{site.path}.{name}": degrees[site.module]
        for site in split.sites
        if site.is_layer
        for name, _ in model.get_submodule(site.path).named_modules()
    }
    first = f"{next(site.path for site in split.sites if site.is_layer)}."
    styles: dict[str, str] = {}
    for pattern, style in (_own_plan(model) if plan is None else plan).items():
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        names = [name for name in degree_of if fits.fullmatch(name)]
        if plan is not None and not names:
            raise ValueError(f"tp_plan has {pattern!r}, which is no module of a layer; layers begin with {first!r}")
        styles |= {name: style for name in names if degree_of[name] > 1}
    if not styles:
        raise ValueError(
            f"tensor={max(degrees.values())}, and {type(model).__name__} has no tp_plan of its own for its layers; "
            f'give one, such as tp_plan={{"{first}mlp.up_proj": "{COLWISE}", "{first}mlp.down_proj": "{ROWWISE}"}}'
        )
    for name, style in styles.items():
        _check(model, name, style, degree_of[name])
    return styles


def _own_plan(model: nn.Module) -> TensorPlan:
    """Returns the styles of a Hugging Face model, or of all outermost ones in a model."""
    plan: dict[str, str] = {}
    outermost: list[str] = []
    for path, module in model.named_modules():
        own = getattr(module, "tp_plan", None)
        if isinstance(own, Mapping) and own and not path.startswith(tuple(outermost)):
            outermost.append(f"{path}." if path else "")
            plan |= {outermost[-1] + pattern: style for pattern, style in own.items()}
    return plan


def _check(model: nn.Module, name: str, style: str, degree: int) -> None:
    module = model.get_submodule(name)
    if style not in _STYLES:
        raise UnsplittableError(
            f"{name}: the style {style!r} is none of {', '.join(_STYLES)}; give tp_plan= without that module and "
            "those that take its output, or use tensor=1"
        )
    if style == SUMMED:
        return
    if type(module) is not nn.Linear:
        raise UnsplittableError(f"{name} is a {type(module).__name__}; {style} splits nn.Linear alone: leave it out")
    features = module.out_features if style == COLWISE else module.in_features
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    counts = [("features", features)]
    if isinstance(head_dim, int) and head_dim and features % head_dim == 0:
        counts.insert(0, ("heads", features // head_dim))
    for what, size in counts:
        if size % degree:
            raise UnsplittableError(
                f"{name} has {size} {what}, which tensor={degree} ranks cannot share evenly; use a number that divides "
                f"{size}, or give tp_plan= without its attention"
            )


def _floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> str:
    """Returns by how much outputs differ; an empty text where roundings explain it."""
    for whole, split in zip(before, after, strict=True):
        if whole.shape != split.shape:  # keys and values of a cache: each rank has its heads'
            continue
        limit = min(MAX_DIFFERENCE, MAX_ROUNDINGS * torch.finfo(whole.dtype).eps)
        differs = float((whole - split).norm()) / max(float(whole.norm()), 1e-30)
        if not differs <= limit:  # also catches NaN
            return f"outputs differ by {differs:.2g}"
    return ""


def _divided(
    counted: CountedModel, named: Mapping[str, Tensor], sliced: Collection[str], degrees: Mapping[str, int]
) -> CountedModel:
    """Returns layers divided over the ranks: times and activations in proportion to weights, which is rough."""
    tables = {id(module.weight) for module in counted.whole.model.modules() if isinstance(module, nn.Embedding)}
    layers, modules = {}, []
    for module in (module for module in counted.model.modules if isinstance(module, CountedModule)):
        scaled, resident = [], []
        for index, layer in enumerate(counted.layers[module.name]):
            part = Part(module=module.name, first=index, count=1, total=len(module.trains))
            names = [name for name in counted.split.parameters_of([part]) if id(named[name]) not in tables]
            freed = sum(named[name].numel() for name in names if name in sliced) * (1 - 1 / degrees[module.name])
            scaled.append(scaled_layer(layer, 1 - freed / max(1, sum(named[name].numel() for name in names))))
            resident.append(round(module.resident_bytes[index] * (1 - freed / max(1, module.parameters[index]))))
        layers[module.name] = tuple(scaled)
        modules.append(replace(module, resident_bytes=tuple(resident)))
    return replace(counted, layers=layers, model=replace(counted.model, modules=tuple(modules)))


def _split_dims(model: nn.Module, styles: Mapping[str, str]) -> dict[str, int]:
    """Returns the weights that are split, by name, with their dimension that is."""
    dims: dict[str, int] = {}
    for path, style in styles.items():
        if style == ROWWISE:
            dims[f"{path}.weight"] = 1
        elif style == COLWISE:
            dims |= {f"{path}.{name}": 0 for name, _ in model.get_submodule(path).named_parameters()}
    return dims


def _linear_of(style: str, mesh: DeviceMesh) -> type[nn.Linear]:
    """Returns the class of linear modules on slices: ``rowwise`` ones add the bias once."""

    class Colwise(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            whole = DTensor.from_local(input, mesh, [Replicate()], run_check=False)
            return functional.linear(whole.to_local(grad_placements=[Partial()]), self.weight, self.bias)

    class Rowwise(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            parts = DTensor.from_local(functional.linear(input, self.weight), mesh, [Partial()], run_check=False)
            whole = parts.redistribute(placements=[Replicate()]).to_local()
            return whole if self.bias is None else whole + self.bias

    return Colwise if style == COLWISE else Rowwise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    dim: int
    shape: torch.Size


class WeightSlices:
    """Splits weights of some layers over the ranks of a group; all of them make it and make the same calls."""

    def __init__(
        self,
        model: nn.Module,
        styles: Mapping[str, str],
        layers: tuple[str, ...],
        group: dist.ProcessGroup,
        progress: RankProgress,
    ) -> None:
        self._model, self._group, self._progress = model, group, progress
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
        own = {path: style for path, style in styles.items() if style != SUMMED and path.startswith(layers)}
        self._slices: dict[str, _Slice] = {}
        for name, dim in _split_dims(model, own).items():
            weight = model.get_parameter(name)
            cut = self._slices[name] = _Slice(dim=dim, shape=weight.shape)
            weight.data = self._own(weight.data, cut).clone(memory_format=torch.contiguous_format)
        self._linears = [model.get_submodule(path) for path in own]
        for linear, style in zip(self._linears, own.values(), strict=True):  # hooks and names stay; copies do the same
            linear.__class__ = _linear_of(style, mesh)
        self.summed = frozenset(
            f"{path}.{name}"
            for path, style in styles.items()
            if style == SUMMED
            for name, _ in model.get_submodule(path).named_parameters()
        )
        """Names of weights of all modules that a group's ranks have whole, and whose gradients are sums over them."""
        self._is_checked = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._slices)

    def forget_dropped(self) -> None:
        """Gives weights on the meta device their whole shape again."""
        named = dict(self._model.named_parameters())
        for name, cut in self._slices.items():
            if named[name].is_meta:
                named[name].data = torch.empty(cut.shape, dtype=named[name].dtype, device="meta")

    def check_once(self) -> None:
        """Compares gradients of whole weights between tensor ranks after the first step."""
        if self._is_checked:
            return
        self._is_checked = True
        whole = [
            (name, parameter.grad)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and name not in self._slices
        ]
        norms = torch.stack([grad.norm().double() for _, grad in whole]) if whole else torch.zeros(0)
        gathered = torch.stack(self._gather(norms))
        spread = (gathered.amax(0) - gathered.amin(0)).tolist()
        for (name, _), norm, differs in zip(whole, norms.tolist(), spread, strict=True):
            if differs > MAX_GRADIENT_DIFFERENCE * (norm + 1e-12):
                module = name.rpartition(".")[0]
                raise ModuleContractError(
                    f"{name} is not split, and tensor ranks have other gradients of it (norms differ by {differs:.2g} "
                    f"of {norm:.2g}): it works on features or heads that are split; add {module!r}: {SUMMED!r} to "
                    "tp_plan="
                )

    @contextmanager
    def whole(self, modules: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A block in which models and optimizers' states are whole; afterwards each rank takes its slices of them.

        Meanwhile a rank needs memory for the whole layers that it has a part of.
        """
        named = [
            (parameter, self._slices[name])
            for module in modules
            for name, parameter in module.named_parameters()
            if name in self._slices and not parameter.is_meta and parameter.shape != self._slices[name].shape
        ]
        optimizers = list(optimizers)
        states = [
            (optimizer.state[parameter], key, cut)
            for optimizer in optimizers
            for parameter, cut in named
            for key in sorted(_sliced_keys(optimizer, parameter))
        ]
        before = [parameter.data for parameter, _ in named]
        own_states = [state[key] for state, key, _ in states]
        for (parameter, cut), own in zip(named, before, strict=True):
            parameter.data = self._join(own, cut)
        for (state, key, cut), own in zip(states, own_states, strict=True):
            state[key] = self._join(own, cut)
        try:
            yield
        finally:
            for (parameter, cut), own in zip(named, before, strict=True):
                parameter.data = own.copy_(self._own(parameter.data, cut))
            for optimizer in optimizers:
                for parameter, cut in named:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor) and value.shape == cut.shape:
                            optimizer.state[parameter][key] = self._own(value, cut).clone()

    def rejoin(self) -> None:
        """Makes weights whole again on the ranks that have slices of them, and restores the modules' classes."""
        for name, parameter in self._model.named_parameters():
            if name in self._slices and not parameter.is_meta:
                parameter.grad = None
                parameter.data = self._join(parameter.data, self._slices[name])
        for linear in self._linears:
            linear.__class__ = nn.Linear

    def _own(self, whole: Tensor, cut: _Slice) -> Tensor:
        return whole.chunk(self._size, cut.dim)[self._rank]

    def _join(self, own: Tensor, cut: _Slice) -> Tensor:
        return torch.cat(self._gather(own), cut.dim)

    def _gather(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self._size)]
        with self._progress.waiting(THE_LOOP, "agreement"):
            dist.all_gather(gathered, own.contiguous(), group=self._group)
        return gathered


def _sliced_keys(optimizer: Optimizer, parameter: nn.Parameter) -> list[str]:
    """Returns keys of an optimizer's state in the shape of a parameter; counts of steps are the same on all ranks."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    keys = [key for key, value in state.items() if isinstance(value, Tensor) and value.numel() > 1]
    wrong = next((key for key in keys if state[key].shape != parameter.shape), None)
    if wrong is not None:
        raise TypeError(
            f"{type(optimizer).__name__} keeps {wrong!r} of shape {tuple(state[wrong].shape)} of a weight whose slice "
            f"is {tuple(parameter.shape)}: it cannot be put together; save without the optimizer, or use one whose "
            "state has the weight's shape"
        )
    return keys
