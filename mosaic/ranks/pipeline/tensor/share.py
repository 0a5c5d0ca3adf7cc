"""Has tensor ranks share the layers of a model that was found and counted whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.graph import Part
from mosaic.pipelining.layers import CountedModule, scaled_layer
from mosaic.ranks.pipeline.counting import CountedModel
from mosaic.ranks.pipeline.grid.rank_grid import RankGrids
from mosaic.ranks.pipeline.tensor.slices import TensorPlan, WeightSlices, check_draws, styles_of

MAX_ROUNDINGS = 1e4
"""By how many roundings outputs of the split and the whole model may differ."""
MAX_DIFFERENCE = 0.1
"""By what share of their norm at most."""


def share_layers(
    model: nn.Module,
    counted: CountedModel,
    grids: RankGrids,
    *,
    degree: int,
    plan: TensorPlan | None,
    sample: Mapping[str, Any],
) -> tuple[CountedModel, WeightSlices]:
    """Splits weights of layers over tensor ranks; returns what is planned with then, and this rank's slices.

    Args:
        model: The user's model, whole.
        counted: What its layers cost.
        grids: All ranks.
        degree: Ranks that share each layer.
        plan: See ``styles_of``.
        sample: A microbatch; the split model has to give what the whole one gives.

    Raises:
        ValueError, UnsplittableError: The layers cannot be shared so; says which and why.
    """
    if any(one.is_meta for one in model.parameters()):
        raise UnsplittableError(
            f"the model is on the meta device, and tensor={degree} ranks share layers of models that have their "
            "weights; make it with weights, or use tensor=1 and more places"
        )
    styles = styles_of(model, counted.split, plan, degree)
    check_draws(model, counted.split, styles, sample)
    before = _outputs(model, sample)
    slices = WeightSlices(model, styles, grids.groups.of_tensor(degree), grids.world.progress)
    try:
        differs = _difference(before, _outputs(model, sample))
    except RuntimeError as error:  # of shapes
        raise _not_paired(styles, str(error)) from error
    if differs:
        raise _not_paired(styles, f"outputs differ by {differs:.2g}")
    return _divided(model, counted, slices, degree), slices


def _outputs(model: nn.Module, sample: Mapping[str, Any]) -> list[Tensor]:
    device = next(model.parameters()).device
    with torch.no_grad(), forked(device):
        leaves = pytree.tree_leaves(model(**sample))
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def _difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Returns by what share of its norm an output differs, 0 where roundings explain it."""
    for one, other in zip(before, after, strict=True):
        if one.shape != other.shape:  # keys and values of a cache: each rank has its heads'
            continue
        limit = min(MAX_DIFFERENCE, MAX_ROUNDINGS * torch.finfo(one.dtype).eps)
        differs = float((one - other).norm()) / max(float(one.norm()), 1e-30)
        if not differs <= limit:  # also catches NaN
            return differs
    return 0.0


def _not_paired(styles: Mapping[str, str], what: str) -> UnsplittableError:
    listed = ", ".join(f"{name}: {style}" for name, style in list(styles.items())[:8])
    return UnsplittableError(
        f"the model does not give the same when its layers are split ({what}): what a colwise module gives has to "
        f"reach a rowwise one, and nothing else; the plan begins with {listed}"
    )


def _divided(model: nn.Module, counted: CountedModel, slices: WeightSlices, degree: int) -> CountedModel:
    """Returns layers of which each rank has a part: times and activations in proportion to weights, which is rough."""
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    named = dict(model.named_parameters())
    layers, modules = {}, []
    for one in counted.model.modules:
        assert isinstance(one, CountedModule)
        shares, resident = [], []
        for index in range(len(one.trains)):
            part = Part(module=one.name, first=index, count=1, total=len(one.trains))
            own = {name: named[name] for name in counted.split.parameters_of([part]) if id(named[name]) not in tables}
            cut = sum(degree * each.numel() for name, each in own.items() if name in slices.names)
            whole = sum(each.numel() for name, each in own.items() if name not in slices.names)
            shares.append((cut / degree + whole) / max(1, cut + whole) if cut else 1.0)
            state_bytes = one.resident_bytes[index]
            resident.append(round(state_bytes * (1 - cut * (1 - 1 / degree) / max(1, one.parameters[index]))))
        layers[one.name] = tuple(
            scaled_layer(layer, share) for layer, share in zip(counted.layers[one.name], shares, strict=True)
        )
        modules.append(replace(one, resident_bytes=tuple(resident)))
    return replace(counted, layers=layers, model=replace(counted.model, modules=tuple(modules)))
