"""Shapes of transformers, with their parameters by closed formulas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A stack of equal layers, each attention and then an MLP, with norms before them.

    Biases and norms' weights are left out: they are below 0.1 % of the parameters.

    Raises:
        ValueError: A size is below 1, or heads do not divide by groups.
    """

    layers: int
    """Layers."""
    hidden: int
    """Width between layers."""
    ffn: int
    """Width within an MLP."""
    heads: int
    """Heads of queries."""
    groups: int
    """Heads of keys and values; as many as ``heads`` without grouping."""
    gated: bool = False
    """True for an MLP with a gate, as SwiGLU: three matrices instead of two."""
    causal: bool = False
    """True for causal attention."""
    cross: bool = False
    """True for a second attention in each layer to another module's output, of this width."""
    vocabulary: int = 0
    """Rows of the token embedding before the first layer; 0: none."""
    tied: bool = False
    """True if the head shares this table."""
    patch: int = 0
    """Numbers in a patch, frame or latent for a projection before the first layer; 0: none."""

    def __post_init__(self) -> None:
        for size in dataclasses.fields(self):
            value = getattr(self, size.name)
            least = 0 if size.name in ("vocabulary", "patch") else 1
            if size.type == "int" and (not isinstance(value, int) or value < least):
                raise ValueError(f"shape: {size.name}={value!r}; use a whole number, {least} or more")
        if self.heads % self.groups:
            raise ValueError(f"shape: {self.heads} heads do not divide by {self.groups} groups")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return max(1, self.hidden // self.heads)

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.groups * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: (2 + 2 g/a) h^2 of attention, as many across, 2 h f of the MLP (gated: 3)."""
        attention = 2 * self.hidden * (self.query_width + self.key_width)
        return attention * (2 if self.cross else 1) + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def first_parameters(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary + self.patch) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of its own head; 0 if it is tied."""
        return 0 if self.tied else self.vocabulary * self.hidden

    def parameters(self, *, with_head: bool = False) -> int:
        """Returns the parameters of all layers, of the steps before the first, and of a head."""
        head = self.head_parameters if with_head else 0
        return self.layers * self.layer_parameters + self.first_parameters + head
