"""This rank's slices of the weights that tensor ranks share, and the whole weights for checkpoints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.optim import Optimizer

from mosaic.errors import ModuleContractError, UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.parts.blank import DrawsSeen
from mosaic.parts.split import ModelSplit
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_STYLES = (COLWISE, ROWWISE, SUMMED)

TensorPlan = Mapping[str, str]
"""For patterns of modules' names, such as ``model.layers.*.mlp.up_proj``, a style."""


def styles_of(model: nn.Module, split: ModelSplit, plan: TensorPlan | None, degree: int) -> dict[str, str]:
    """Returns for each module that is split its style, by name.

    Args:
        model: The user's model.
        split: Where it can be cut.
        plan: The user's; None: the model's own ``tp_plan``, of which layers' modules count.
        degree: Ranks that share each layer.

    Raises:
        ValueError: There is no plan, or a pattern of the user's fits no module of a layer.
        UnsplittableError: A module cannot be split so; names it.
    """
    own = getattr(model, "tp_plan", None) or {}
    layers = tuple(f"{site.path}." for site in split.sites if site.is_layer)
    inside = [name for name, _ in model.named_modules() if name.startswith(layers)]
    found: dict[str, str] = {}
    for pattern, style in (own if plan is None else plan).items():
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        names = [name for name in inside if fits.fullmatch(name)]
        if plan is not None and not names:
            raise ValueError(f"tp_plan has {pattern!r}, which is no module of a layer; layers begin with {layers[0]!r}")
        found |= dict.fromkeys(names, style)
    if not found:
        raise ValueError(
            f"tensor={degree}, and {type(model).__name__} has no tp_plan of its own for its layers; give one, such as "
            f'tp_plan={{"{layers[0]}mlp.up_proj": "{COLWISE}", "{layers[0]}mlp.down_proj": "{ROWWISE}"}}'
        )
    for name, style in found.items():
        _check(model, name, style, degree)
    return found


def check_draws(model: nn.Module, split: ModelSplit, styles: Mapping[str, str], sample: Mapping[str, Any]) -> None:
    """Raises UnsplittableError if a layer that is split draws random numbers: each rank would draw others."""
    layers = dict.fromkeys(site.path for site in split.sites if site.is_layer)
    shared = [path for path in layers if any(name.startswith(f"{path}.") for name in styles)]
    with torch.no_grad(), forked(next(model.parameters()).device), ExitStack() as hooks, DrawsSeen() as seen:
        before: dict[nn.Module, int] = {}
        drawing: dict[nn.Module, bool] = {}

        def enter(layer: nn.Module, _: Any) -> None:
            before[layer] = len(seen.draws)

        def leave(layer: nn.Module, *_: Any) -> None:
            drawing[layer] = drawing.get(layer, False) or len(seen.draws) > before[layer]

        for path in shared:
            layer = model.get_submodule(path)
            hooks.callback(layer.register_forward_pre_hook(enter).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        model(**sample)
    wrong = next((path for path in shared if drawing.get(model.get_submodule(path))), None)
    if wrong is not None:
        raise UnsplittableError(
            f"{wrong} is split over tensor ranks and draws random numbers, as dropout does: each rank would draw its "
            "own, and none the plain model's; set dropout in layers to 0, or use tensor=1"
        )


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
    for what, size in _counts(model, name, module, style):
        if size % degree:
            raise UnsplittableError(
                f"{name} has {size} {what}, which tensor={degree} ranks cannot share evenly; use a number that divides "
                f"{size}, or give tp_plan= without its attention"
            )


def _counts(model: nn.Module, name: str, module: nn.Linear, style: str) -> Iterator[tuple[str, int]]:
    """Gives what has to be shared evenly."""
    features = module.out_features if style == COLWISE else module.in_features
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and head_dim and features % head_dim == 0:
        yield "heads", features // head_dim
    yield "features", features


Forward = Callable[[nn.Linear, Tensor], Tensor]
"""Of a linear module with its input."""


@dataclass(slots=True, kw_only=True)
class SharedInput:
    """The input of several modules beside each other, such as queries, keys and values: its gradient is summed once."""

    mesh: DeviceMesh
    """The ranks that share the layer."""
    given: Tensor | None = None
    """The last input, until a module that is split by inputs has run."""
    entered: Tensor | None = None
    """What modules are given for it."""
    has_graph: bool = False
    """Whether that was made with gradients on."""

    def enter(self, given: Tensor) -> Tensor:
        """Returns an input whose gradient is the sum of those of all ranks."""
        if self.entered is None or self.given is not given or self.has_graph != torch.is_grad_enabled():
            whole = DTensor.from_local(given, self.mesh, [Replicate()], run_check=False)
            self.given, self.entered = given, whole.to_local(grad_placements=[Partial()])
            self.has_graph = torch.is_grad_enabled()
        return self.entered

    def leave(self, made: Tensor) -> Tensor:
        """Returns the sum of what all ranks made."""
        self.given = self.entered = None
        parts = DTensor.from_local(made, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()


def split_linear(linear: nn.Linear, style: str, shared: SharedInput) -> None:
    """Makes a linear module, whose weights are slices already, compute its share; hooks and names stay.

    Its class is swapped, so that copies of the model compute with their own weights.

    Args:
        linear: The module.
        style: ``colwise`` or ``rowwise``.
        shared: One for all modules of one parent.
    """
    forward = _by_outputs(shared) if style == COLWISE else _by_inputs(shared)
    linear.__class__ = type(f"{style.capitalize()}Linear", (nn.Linear,), {"forward": forward})


def _by_outputs(shared: SharedInput) -> Forward:
    """Takes the whole input, gives this rank's features."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return functional.linear(shared.enter(input), self.weight, self.bias)

    return forward


def _by_inputs(shared: SharedInput) -> Forward:
    """Takes this rank's features, gives the whole output; the bias is added once."""

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        whole = shared.leave(functional.linear(input, self.weight))
        return whole if self.bias is None else whole + self.bias

    return forward


MAX_DIFFERENCE = 1e-3
"""Of a gradient's norm between ranks that have it whole, as a share; sums in another order differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """How a weight is split."""

    dim: int
    """Its axis."""
    shape: torch.Size
    """Of the whole."""


class WeightSlices:
    """Splits weights over the ranks of a group, each its own; all of them make it and make the same calls.

    Args:
        model: The user's model, whole.
        styles: For each module that is split its style.
        group: The ranks that share each layer.
        progress: Where this rank is.

    Attributes:
        summed: Names of weights that all of them have whole, and whose gradients are sums over them.
    """

    def __init__(
        self, model: nn.Module, styles: Mapping[str, str], group: dist.ProcessGroup, progress: RankProgress
    ) -> None:
        self._model, self._group, self._progress = model, group, progress
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._slices: dict[str, _Slice] = {}
        self.summed: set[str] = set()
        self._is_checked = False
        self._classes: dict[str, type[nn.Linear]] = {}
        mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
        inputs: defaultdict[str, SharedInput] = defaultdict(lambda: SharedInput(mesh=mesh))
        for path, style in styles.items():
            module = model.get_submodule(path)
            if style == SUMMED:
                self.summed |= {f"{path}.{name}" for name, _ in module.named_parameters()}
                continue
            assert isinstance(module, nn.Linear)
            self._cut(f"{path}.weight", module.weight, 0 if style == COLWISE else 1)
            if module.bias is not None and style == COLWISE:
                self._cut(f"{path}.bias", module.bias, 0)
            self._classes[path] = type(module)
            split_linear(module, style, inputs[path.rpartition(".")[0]])

    @property
    def names(self) -> frozenset[str]:
        """Names of the weights that are split."""
        return frozenset(self._slices)

    def forget_dropped(self) -> None:
        """Has weights that were given up stand for whole ones again."""
        named = dict(self._model.named_parameters())
        for name, cut in self._slices.items():
            if named[name].is_meta:
                named[name].data = torch.empty(cut.shape, dtype=named[name].dtype, device="meta")

    def check_once(self) -> None:
        """After the first step: raises ModuleContractError if a weight that is not split has other gradients elsewhere.

        Its inputs were then not the same on all ranks: it stands between split modules, and its gradients are to be
        summed.
        """
        if self._is_checked:
            return
        self._is_checked = True
        whole = [
            (name, one.grad)
            for name, one in self._model.named_parameters()
            if one.grad is not None and name not in self._slices
        ]
        norms = torch.stack([grad.norm().double() for _, grad in whole]) if whole else torch.zeros(0)
        found = self._told(norms)
        spread = (torch.stack(found).amax(0) - torch.stack(found).amin(0)).tolist()
        for (name, _), norm, differs in zip(whole, norms.tolist(), spread, strict=True):
            if differs > MAX_DIFFERENCE * (norm + 1e-12):
                module = name.rpartition(".")[0]
                raise ModuleContractError(
                    f"{name} is not split, and tensor ranks have other gradients of it (norms differ by {differs:.2g} "
                    f"of {norm:.2g}): it works on features or heads that are split; add {module!r}: {SUMMED!r} to "
                    "tp_plan="
                )

    @contextmanager
    def whole(self, modules: Sequence[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """Has models and optimizers' states whole for a while; afterwards each rank takes its slices of them.

        Meanwhile a rank needs memory for the whole layers that it has a part of.

        Args:
            modules: The model, and copies of it such as an average of weights.
            optimizers: Of the model.

        Raises:
            TypeError: An optimizer keeps something of another shape than the weight's.
        """
        named = [
            (one, self._slices[name])
            for module in modules
            for name, one in module.named_parameters()
            if name in self._slices and not one.is_meta and one.shape != self._slices[name].shape
        ]
        optimizers = list(optimizers)
        states = [
            (optimizer.state[one], key, cut)
            for optimizer in optimizers
            for one, cut in named
            for key in sorted(self._kept(optimizer, one))
        ]
        before = [one.data for one, _ in named]
        kept = [state[key] for state, key, _ in states]
        for (one, cut), own in zip(named, before, strict=True):
            one.data = self._joined(own, cut)
        for (state, key, cut), own in zip(states, kept, strict=True):
            state[key] = self._joined(own, cut)
        try:
            yield
        finally:
            for (one, cut), own in zip(named, before, strict=True):
                one.data = own.copy_(self._own(one.data, cut))
            for optimizer in optimizers:
                for one, cut in named:
                    for key, value in optimizer.state.get(one, {}).items():
                        if isinstance(value, Tensor) and value.shape == cut.shape:
                            optimizer.state[one][key] = self._own(value, cut).clone()

    def rejoin(self) -> None:
        """Makes weights whole again on the ranks that have slices of them, and modules what they were."""
        for name, one in self._model.named_parameters():
            if name in self._slices and not one.is_meta:
                one.grad = None
                one.data = self._joined(one.data, self._slices[name])
        for path, kind in self._classes.items():
            self._model.get_submodule(path).__class__ = kind

    def _cut(self, name: str, weight: Tensor, dim: int) -> None:
        cut = self._slices[name] = _Slice(dim=dim, shape=weight.shape)
        weight.data = self._own(weight.data, cut).clone(memory_format=torch.contiguous_format)

    def _own(self, whole: Tensor, cut: _Slice) -> Tensor:
        return whole.chunk(self._size, cut.dim)[self._rank]

    def _joined(self, own: Tensor, cut: _Slice) -> Tensor:
        return torch.cat(self._told(own), cut.dim)

    def _told(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self._size)]
        with self._progress.waiting(THE_LOOP, "agreement"):
            dist.all_gather(found, own.contiguous(), group=self._group)
        return found

    @staticmethod
    def _kept(optimizer: Optimizer, parameter: nn.Parameter) -> list[str]:
        """Returns what an optimizer keeps of a parameter in its shape; counts of steps are the same on all ranks."""
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        found = [key for key, value in state.items() if isinstance(value, Tensor) and value.numel() > 1]
        wrong = next((key for key in found if state[key].shape != parameter.shape), None)
        if wrong is not None:
            raise TypeError(
                f"{type(optimizer).__name__} keeps {wrong!r} of shape {tuple(state[wrong].shape)} of a weight whose "
                f"slice is {tuple(parameter.shape)}: it cannot be put together; save without the optimizer, or use one "
                "whose state has the weight's shape"
            )
        return found
