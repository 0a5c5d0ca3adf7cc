"""Tensor parallelism: several ranks share the layers of a model that was cut and counted whole.

Each rank has its own slice of a matrix, as a plain parameter under its name, so that optimizers, clipping, scalers and
buckets of gradients work unchanged; torch's DTensor carries activations between the ranks, and their gradients.
``parallelize_module`` is not used: it makes DTensors of split weights alone, and torch (2.13) refuses lists of both
kinds, as in ``clip_grad_norm_``, ``foreach`` and ``fused`` optimizers and buckets; nor can such a parameter give up its
memory (``parameter.data = meta``, ``swap_tensors``), as weights of other ranks do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from mosaic.find.random_numbers import RandomState, forked, torch_state
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

    Args:
        model: The user's model.
        counted: Its layers.
        group: The ranks that share this one's layers.
        progress: Of this rank.
        degrees: Tensor ranks by module.
        own: The modules whose layers are shared by the group; others stay whole here.
        plan: The user's styles.
        sample: A microbatch.

    Raises:
        ValueError, UnsplittableError: The layers cannot be shared so; says which and why.
    """
    degree = max(degrees.values())
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsplittableError(
            f"the model is on the meta device, and tensor={degree} ranks share layers of models that have their "
            "weights; make it with weights, or use tensor=1 and more ranks of a pipeline"
        )
    styles = styles_of(model, counted.split, plan, degrees)
    before = _outputs(model, counted.split, styles, sample)
    divided = _divided(model, counted, styles, degrees)
    layers = tuple(f"{site.path}." for site in counted.split.sites if site.is_layer and site.module in own)
    slices = WeightSlices(model, styles, layers, group, progress)
    try:
        with torch.no_grad(), forked(next(model.parameters()).device):
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


def styles_of(
    model: nn.Module, split: ModelSplit, plan: TensorPlan | None, degrees: Mapping[str, int]
) -> dict[str, str]:
    """Returns the style of each split module, by name.

    Args:
        model: The user's model.
        split: The split of the model.
        plan: The user's; None: the ``tp_plan`` of the model or of the models in it, of which layers' modules count.
        degrees: Ranks that share each layer, by module.

    Raises:
        ValueError: There is no plan, or a pattern of the user's fits no module of a layer.
        UnsplittableError: A module cannot be split so; names it.
    """
    degree_of = {f"{site.path}.": degrees[site.module] for site in split.sites if site.is_layer}
    layers = tuple(degree_of)
    inside = [name for name, _ in model.named_modules() if name.startswith(layers)]
    styles: dict[str, str] = {}
    for pattern, style in (_own_plan(model) if plan is None else plan).items():
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        names = [name for name in inside if fits.fullmatch(name)]
        if plan is not None and not names:
            raise ValueError(f"tp_plan has {pattern!r}, which is no module of a layer; layers begin with {layers[0]!r}")
        styles |= dict.fromkeys(names, style)
    degree_of = {name: next(own for path, own in degree_of.items() if name.startswith(path)) for name in styles}
    styles = {name: style for name, style in styles.items() if degree_of[name] > 1}
    if not styles:
        raise ValueError(
            f"tensor={max(degrees.values())}, and {type(model).__name__} has no tp_plan of its own for its layers; "
            "give one, such as "
            f'tp_plan={{"{layers[0]}mlp.up_proj": "{COLWISE}", "{layers[0]}mlp.down_proj": "{ROWWISE}"}}'
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


def _outputs(model: nn.Module, split: ModelSplit, styles: Mapping[str, str], sample: Mapping[str, Any]) -> list[Tensor]:
    """Returns the whole model's outputs.

    Raises:
        UnsplittableError: A layer that is split draws random numbers, of which each rank would draw others.
    """
    device = next(model.parameters()).device
    layers = dict.fromkeys(site.path for site in split.sites if site.is_layer)
    drawing: list[str] = []
    with torch.no_grad(), forked(device), ExitStack() as hooks:
        for path in layers:
            if not any(name.startswith(f"{path}.") for name in styles):
                continue
            before: list[RandomState] = []

            def enter(_: nn.Module, __: Any, before: list[RandomState] = before) -> None:
                before.append(torch_state(device))

            def leave(*_: Any, before: list[RandomState] = before, path: str = path) -> None:
                if not before.pop().is_same(torch_state(device)):
                    drawing.append(path)

            layer = model.get_submodule(path)
            hooks.callback(layer.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        outputs = _floats(model(**sample))
    if drawing:
        raise UnsplittableError(
            f"{drawing[0]} is split over tensor ranks and draws random numbers, as dropout does: each rank would draw "
            "its own, and none the plain model's; set dropout in layers to 0, or use tensor=1"
        )
    return outputs


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
    model: nn.Module, counted: CountedModel, styles: Mapping[str, str], degrees: Mapping[str, int]
) -> CountedModel:
    """Returns layers divided over the ranks: times and activations in proportion to weights, which is rough."""
    split = {name for path, style in styles.items() for name in _split_weights(model, path, style)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = dict(model.named_parameters())
    layers, modules = {}, []
    for module in counted.model.modules:
        assert isinstance(module, CountedModule)
        degree = degrees[module.name]
        scaled, resident = [], []
        for index, layer in enumerate(counted.layers[module.name]):
            part = Part(module=module.name, first=index, count=1, total=len(module.trains))
            names = [name for name in counted.split.parameters_of([part]) if id(named[name]) not in tables]
            cut = sum(named[name].numel() for name in names if name in split)
            whole = sum(named[name].numel() for name in names if name not in split)
            scaled.append(scaled_layer(layer, (cut / degree + whole) / max(1, cut + whole) if cut else 1.0))
            share = 1 - cut * (1 - 1 / degree) / max(1, module.parameters[index])
            resident.append(round(module.resident_bytes[index] * share))
        layers[module.name] = tuple(scaled)
        modules.append(replace(module, resident_bytes=tuple(resident)))
    return replace(counted, layers=layers, model=replace(counted.model, modules=tuple(modules)))


def _split_weights(model: nn.Module, path: str, style: str) -> dict[str, int]:
    """Returns the weights of a linear module that are split, by name, with their dimension that is."""
    if style == SUMMED:
        return {}
    has_bias = style == COLWISE and model.get_submodule(path).bias is not None
    return {f"{path}.weight": 0 if style == COLWISE else 1} | ({f"{path}.bias": 0} if has_bias else {})


@dataclass(slots=True, kw_only=True)
class SharedInput:
    """The input of several modules side by side, such as queries, keys and values: its gradient is summed once."""

    mesh: DeviceMesh
    input: Tensor | None = None
    """The last input, until a rowwise module has run."""
    entered: Tensor | None = None
    """The same for the modules, with a gradient that is summed."""
    has_graph: bool = False
    """True if gradients were on when that was computed."""

    def enter(self, input: Tensor) -> Tensor:
        """Returns an input whose gradient is the sum of those of all ranks."""
        if self.entered is None or self.input is not input or self.has_graph != torch.is_grad_enabled():
            whole = DTensor.from_local(input, self.mesh, [Replicate()], run_check=False)
            self.input, self.entered = input, whole.to_local(grad_placements=[Partial()])
            self.has_graph = torch.is_grad_enabled()
        return self.entered

    def leave(self, output: Tensor) -> Tensor:
        """Returns the sum of the outputs of all ranks."""
        self.input = self.entered = None
        parts = DTensor.from_local(output, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def split_linear(linear: nn.Linear, style: str, shared: SharedInput) -> None:
    """Makes a linear module, whose weights are slices already, compute its share; hooks and names stay.

    Its class is swapped, so that copies of the model compute with their own weights.

    Args:
        linear: The module.
        style: ``colwise``: whole input, this rank's output features; ``rowwise``: this rank's input features, the whole
            output, and the bias once.
        shared: One for all modules of one parent.
    """

    def colwise(self: nn.Linear, input: Tensor) -> Tensor:
        return functional.linear(shared.enter(input), self.weight, self.bias)

    def rowwise(self: nn.Linear, input: Tensor) -> Tensor:
        whole = shared.leave(functional.linear(input, self.weight))
        return whole if self.bias is None else whole + self.bias

    forward = colwise if style == COLWISE else rowwise
    linear.__class__ = type(f"{style.capitalize()}Linear", (nn.Linear,), {"forward": forward})


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
        self._slices: dict[str, _Slice] = {}
        self.summed: set[str] = set()
        """Names of weights of all modules that a group's ranks have whole, and whose gradients are sums over them."""
        self._is_checked = False
        self._classes: dict[str, type[nn.Linear]] = {}
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
        inputs: defaultdict[str, SharedInput] = defaultdict(lambda: SharedInput(mesh=mesh))
        for path, style in styles.items():
            module = model.get_submodule(path)
            if style == SUMMED:
                self.summed |= {f"{path}.{name}" for name, _ in module.named_parameters()}
                continue
            if not path.startswith(layers):
                continue
            assert isinstance(module, nn.Linear)
            for name, dim in _split_weights(model, path, style).items():
                self._cut(name, model.get_parameter(name), dim)
            self._classes[path] = type(module)
            split_linear(module, style, inputs[path.rpartition(".")[0]])

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
        """Compares gradients of whole weights between tensor ranks after the first step.

        Raises:
            ModuleContractError: They differ, so inputs of the weight differ between the ranks: it stands between split
                modules, and its gradients are to be summed.
        """
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

        Raises:
            TypeError: An optimizer keeps a tensor of another shape than the weight's.
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
        for path, kind in self._classes.items():
            self._model.get_submodule(path).__class__ = kind

    def _cut(self, name: str, weight: Tensor, dim: int) -> None:
        cut = self._slices[name] = _Slice(dim=dim, shape=weight.shape)
        weight.data = self._own(weight.data, cut).clone(memory_format=torch.contiguous_format)

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
