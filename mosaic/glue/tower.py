"""A tower: an encoder of one modality, and the projector that takes its features to the language model's width."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs = dict[str, Any]
"""Keyword arguments of a model."""
Features = Tensor | list[Tensor]
"""Items by (items, tokens, width), or a list of items by (tokens, width) each; or (tokens, width) of all items."""

CALLBACKS = ("before", "after", "after_projector", "positions")
"""Functions of the user's that a tower may have."""
PROJECTORS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, target: nn.Sequential(nn.Linear(width, target), nn.GELU(), nn.Linear(target, target)),
}
"""By name: made of the tower's width and the language model's. ``mlp`` is LLaVA-1.5's."""


class Tower(nn.Module):
    """An encoder with a projector, and functions of the user's around both (Cornstarch, section 5.1).

    ::

        inputs -> before -> model -> after -> projector -> after_projector -> the language model's placeholders

    Args:
        model: The encoder, called with the tower's inputs as keywords.
        projector: ``"mlp"``, ``"linear"``, a module of your own, or None where widths are equal.
        token: Id of the tower's placeholders in ``input_ids``, one for each token that it returns; it may lie beyond
            the language model's vocabulary. None: its features are put into the text by the glue's ``before``.
        width: Of what the projector gets; by default the model's ``config.hidden_size`` or ``config.d_model``.
        before: Makes the model's keywords of the tower's inputs.
        after: Makes the projector's input of the tower's inputs and the model's output; by default the output's
            ``last_hidden_state``, or the output where it is a tensor.
        after_projector: Makes the tower's features of its inputs and the projector's output.
        positions: Makes of the tower's inputs, for each item, (axes, tokens): where its tokens are in it, such as time,
            row and column of a patch, for language models with M-RoPE.

    Raises:
        ValueError: The projector is of no known name, or the model has a decoder.
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
            raise ValueError(
                f"projector={projector!r} is none of {', '.join(PROJECTORS)}; use one of these, a module, or None"
            )
        check_no_decoder(model, "tower")
        self.model = model
        self.projector = None if isinstance(projector, str) else projector
        self.kind = projector if isinstance(projector, str) else "none" if projector is None else "own"
        self.token = token
        self.width = width if width is not None else _width_of(model)
        self.before, self.after, self.after_projector, self.positions = before, after, after_projector, positions

    def fit(self, name: str, width: int) -> None:
        """Makes the projector to the language model's width, if it was given by name.

        Raises:
            ValueError: The tower's width is not known, or differs and there is no projector.
        """
        if self.kind == "none" and self.width not in (None, width):
            raise ValueError(
                f"{name!r} returns features of width {self.width}, the language model takes {width}; give "
                "projector='linear' or 'mlp'"
            )
        if self.kind not in PROJECTORS or self.projector is not None:
            return
        if self.width is None:
            raise ValueError(
                f"the width of {name!r} is not known: its config has neither hidden_size nor d_model; give "
                "Tower(..., width=...)"
            )
        like = next(self.model.parameters(), torch.empty(0))
        self.projector = PROJECTORS[self.kind](self.width, width).to(like.device, like.dtype)

    def forward(self, **inputs: Any) -> Features:
        """Returns the features of the inputs, in the language model's width.

        Where the model is frozen and no input needs gradients, it keeps no graph, whatever hooks on it ask for.
        """
        given = inputs if self.before is None else self.before(dict(inputs))
        if self._keeps_graph(given):
            output = self.model(**given)
        else:
            with torch.no_grad():
                output = self.model(**given)
        found = _hidden(output) if self.after is None else self.after(inputs, output)
        if self.projector is not None:
            if self.kind in PROJECTORS:
                _check_width(found, cast(int, self.width))
            found = self.projector(found) if isinstance(found, Tensor) else [self.projector(item) for item in found]
        return found if self.after_projector is None else self.after_projector(inputs, found)

    def _keeps_graph(self, inputs: Mapping[str, Any]) -> bool:
        return any(parameter.requires_grad for parameter in self.model.parameters()) or any(
            isinstance(value, Tensor) and value.requires_grad for value in pytree.tree_leaves(inputs)
        )


def _check_width(found: Features, width: int) -> None:
    for item in [found] if isinstance(found, Tensor) else found:
        if item.shape[-1] != width:
            raise ValueError(
                f"the projector gets {tuple(item.shape)} and was made for features of width {width}; give "
                "Tower(..., width=...), or Tower(..., after=...), which returns (items, tokens, width)"
            )


def check_no_decoder(model: nn.Module, what: str) -> None:
    """Checks that a model takes no second sequence.

    Raises:
        ValueError: It is an encoder with a decoder.
    """
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder, and no {what}: its decoder wants a text of its own; "
            "hand over one side of it, such as model.get_encoder()"
        )


def _width_of(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("hidden_size", "d_model"):
        if isinstance(found := getattr(config, name, None), int):
            return found
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
