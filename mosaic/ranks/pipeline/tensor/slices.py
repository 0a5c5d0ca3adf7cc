"""This rank's slices of the weights that tensor ranks share, and the whole weights for checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from mosaic.errors import ModuleContractError
from mosaic.ranks.pipeline.tensor.linears import SharedInput, split_linear
from mosaic.ranks.pipeline.tensor.styles import COLWISE, SUMMED
from mosaic.ranks.world.progress import THE_LOOP, RankProgress

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
