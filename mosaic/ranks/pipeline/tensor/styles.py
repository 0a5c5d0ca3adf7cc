"""Which modules of layers are split over tensor ranks, and how: a Hugging Face model's own plan, or the user's.

A matrix split by its rows of outputs (``colwise``) gives each rank some features or heads; one split by its inputs
(``rowwise``) takes them and gives the sum over ranks. Between such a pair stand operations on each feature or head
alone (Shoeybi et al., arXiv 1909.08053, section 3). Modules between them that all ranks have whole, such as norms of
heads, are ``replicated_with_grad_allreduce``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from mosaic.errors import UnsplittableError
from mosaic.find.random_numbers import forked
from mosaic.parts.draws import DrawsSeen
from mosaic.parts.split import ModelSplit

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
            before[layer] = len(seen.draws())

        def leave(layer: nn.Module, *_: Any) -> None:
            drawing[layer] = drawing.get(layer, False) or len(seen.draws()) > before[layer]

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
