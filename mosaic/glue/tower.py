"""A tower: an encoder of one modality, and a projector to the language model's width."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mosaic.errors import unknown

Inputs = dict[str, Any]
"""Keyword arguments of a model."""
Features = Tensor | list[Tensor]
"""Items by (items, tokens, width), or a list of items by (tokens, width) each; or (tokens, width) of all items."""

CALLBACKS = ("before", "after", "after_projector", "positions")
"""Names of a tower's user functions."""
PROJECTORS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, target: nn.Sequential(nn.Linear(width, target), nn.GELU(), nn.Linear(target, target)),
}
"""Constructors from the tower's and the language model's width. ``mlp`` is LLaVA-1.5's."""


class Tower(nn.Module):
    """An encoder with a projector, and user functions around both (Cornstarch, section 5.1).

    ::

        inputs -> before -> model -> after -> projector -> after_projector -> the language model's placeholders

    Args:
        model: The encoder, called with the tower's inputs as keywords.
        projector: ``"mlp"``, ``"linear"``, a module of your own, or None where widths are equal.
        token: Id of the tower's placeholders in ``input_ids``, one for each feature; it may lie beyond the language
            model's vocabulary. None: the glue's ``before`` puts its features into the text.
        width: Width of the projector's input; by default the model's ``config.hidden_size`` or ``config.d_model``.
        before: Maps the tower's inputs to the model's keywords.
        after: Maps the tower's inputs and the model's output to the projector's input; by default the output's
            ``last_hidden_state``, or an output tensor itself.
        after_projector: Maps the tower's inputs and the projector's output to the tower's features.
        positions: Maps the tower's inputs to (axes, tokens) for each item: positions of its tokens, such as time, row
            and column of a patch, for language models with M-RoPE.

    Raises:
        ValueError: The projector's name is unknown, or the model has a decoder.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        projector: str | nn.Module | None = "mlp",
        token: int | None = None,
        width: int | None = None,
        before: Callable[[Inputs], Inputs] | None = None,
        after: Callable[[Inputs, Any], Features] | None = None,
        after_projector: Callable[[Inputs, Features], Features] | None = None,
        positions: Callable[[Inputs], list[Tensor]] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"{unknown('projector', projector, PROJECTORS)}, or use a module or None")
        check_no_decoder(model, "tower")
        self.model = model
        self.projector = None if isinstance(projector, str) else projector
        self.kind = projector if isinstance(projector, str) else "none" if projector is None else "own"
        self.token = token
        self.width = width if width is not None else _width_of(model)
        self.before, self.after, self.after_projector, self.positions = before, after, after_projector, positions

    def fit(self, name: str, width: int) -> None:
        """Makes a projector given by name, to the language model's width.

        Raises:
            ValueError: The tower's width is unknown, or differs without a projector.
        """
        if self.kind == "none" and self.width not in (None, width):
            raise ValueError(
                f"{name!r} returns features of width {self.width}, the language model takes {width}; use "
                "projector='linear' or 'mlp'"
            )
        if self.kind not in PROJECTORS or self.projector is not None:
            return
        if self.width is None:
            raise ValueError(
                f"the width of {name!r} is unknown: its config has neither hidden_size nor d_model; pass "
                "Tower(..., width=...)"
            )
        like = next(self.model.parameters(), torch.empty(0))
        self.projector = PROJECTORS[self.kind](self.width, width).to(like.device, like.dtype)

    def forward(self, **inputs: Any) -> Features:
        """Returns the features of the inputs, in the language model's width.

        A frozen model keeps no graph if no input needs gradients, whatever its hooks request.
        """
        model_inputs = inputs if self.before is None else self.before(dict(inputs))
        if self._keeps_graph(model_inputs):
            output = self.model(**model_inputs)
        else:
            with torch.no_grad():
                output = self.model(**model_inputs)
        features = _hidden(output) if self.after is None else self.after(inputs, output)
        if self.projector is not None:
            if self.kind in PROJECTORS:
                _check_width(features, cast(int, self.width))
            is_list = not isinstance(features, Tensor)
            features = [self.projector(item) for item in features] if is_list else self.projector(features)
        return features if self.after_projector is None else self.after_projector(inputs, features)

    def _keeps_graph(self, inputs: Mapping[str, Any]) -> bool:
        return any(parameter.requires_grad for parameter in self.model.parameters()) or any(
            isinstance(value, Tensor) and value.requires_grad for value in pytree.tree_leaves(inputs)
        )


def _check_width(features: Features, width: int) -> None:
    for item in [features] if isinstance(features, Tensor) else features:
        if item.shape[-1] != width:
            raise ValueError(
                f"the projector gets {tuple(item.shape)} and was made for features of width {width}; give "
                "Tower(..., width=...), or Tower(..., after=...), which returns (items, tokens, width)"
            )


def check_no_decoder(model: nn.Module, role: str) -> None:
    """Raises ValueError if a model is an encoder with a decoder."""
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder, not a {role}: its decoder needs its own text; "
            "pass one half, such as model.get_encoder()"
        )


def _width_of(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("hidden_size", "d_model"):
        if isinstance(width := getattr(config, name, None), int):
            return width
    return None


def _hidden(output: Any) -> Features:
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__} without a last_hidden_state; give Tower(..., after=...), "
            "which makes features of it"
        )
    return hidden
