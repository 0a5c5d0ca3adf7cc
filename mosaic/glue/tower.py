"""A tower: an encoder of one modality with a projector to the language model's width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.errors import unknown

Inputs = dict[str, Any]
"""Keyword arguments of a model."""
Features = Tensor | list[Tensor]
"""(items, tokens, width), a list of items (tokens, width), or (tokens, width) of all items."""

CALLBACKS = ("before", "after")
"""Names of a tower's callbacks."""
PROJECTORS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "mlp": lambda width, target: nn.Sequential(nn.Linear(width, target), nn.GELU(), nn.Linear(target, target)),
}
"""Constructors by the tower's and the language model's width. ``mlp`` is LLaVA-1.5's."""


class Tower(nn.Module):
    """An encoder with a projector, and callbacks around both (Cornstarch, section 5.1).

    ::

        inputs -> before -> model -> after -> projector -> the language model's placeholders

    Args:
        model: The encoder, called with the tower's inputs as keywords.
        token: Id of the tower's placeholders in ``input_ids``, one per feature; may be outside the language model's
            vocabulary.
        projector: ``"mlp"``, ``"linear"``, a module of your own, or None if widths are equal.
        width: Width of the projector's input; by default the model's ``config.hidden_size`` or ``config.d_model``.
        before: Maps the tower's inputs to the model's keywords.
        after: Maps the tower's inputs and the model's output to the projector's input; by default the output's
            ``last_hidden_state``, or the output if it is a tensor.

    Raises:
        ValueError: The projector's name is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token: int,
        projector: str | nn.Module | None = "mlp",
        width: int | None = None,
        before: Callable[[Inputs], Inputs] | None = None,
        after: Callable[[Inputs, Any], Features] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"{unknown('projector', projector, PROJECTORS)}, a module or None")
        config = getattr(model, "config", None)
        self.model = model
        self.projector = None if isinstance(projector, str) else projector
        self.kind = projector if isinstance(projector, str) else "none" if projector is None else "own"
        self.token = token
        self.width = width or getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
        self.before, self.after = before, after

    def fit(self, name: str, width: int) -> None:
        """Creates a projector by name, to the language model's width."""
        if self.kind == "none" and self.width not in (None, width):
            raise ValueError(
                f"{name!r} returns features of width {self.width}, but the language model needs {width}; use "
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
        """Returns the features of the inputs, in the language model's width."""
        output = self.model(**(inputs if self.before is None else self.before(dict(inputs))))
        features = _hidden(output) if self.after is None else self.after(inputs, output)
        if self.projector is None:
            return features
        is_list = not isinstance(features, Tensor)
        return [self.projector(item) for item in features] if is_list else self.projector(features)


def _hidden(output: Any) -> Features:
    hidden = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__} without a last_hidden_state; pass Tower(..., after=...), "
            "which converts it to features"
        )
    return hidden
