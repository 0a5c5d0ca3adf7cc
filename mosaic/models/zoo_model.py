"""A model of the zoo: a line of its table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn


def loss_of(output: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss of a model's output.

    Raises:
        ValueError: The batch had nothing to learn from.
    """
    if "loss" not in output:
        raise ValueError(
            f"the model returned {', '.join(output) or 'nothing'} and no loss; give it a batch with targets"
        )
    return output["loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """Everything that the command line, the bench and tests know of a model."""

    name: str
    """As in ``--model zoo:NAME-SIZE``."""
    make: Callable[[Any], nn.Module]
    """Makes it from a configuration; its forward takes a batch as keywords."""
    sample: Callable[..., dict[str, Any]]
    """Draws a batch: takes a configuration, a ``Draw``, and choices of the model's own as keywords."""
    sizes: Mapping[str, Any]
    """Its configurations by size; frozen dataclasses with ``inputs``, to be changed with ``dataclasses.replace``."""
    source: str
    """Who published it."""
    workload: Literal["mosaic", "spindle"] | None = None
    """The paper that measures it: Mosaic's Table 1 and Table 2, or Spindle's section 5."""
    loss: Callable[[Mapping[str, Tensor]], Tensor] = loss_of
    """Returns the loss of its forward's output."""
    frozen: tuple[str, ...] = ()
    """Modules that its original training leaves as they were."""
    encoders: tuple[str, ...] = ()
    """Modules that read samples; those of the paper's Table 1 first."""
    backbone: tuple[str, ...] = ()
    """Modules that read what the encoders make; none where there are only encoders."""
    tasks: tuple[str, ...] = ()
    """Tasks that a batch may be made of, for models of several: any of them as ``make_batch(..., tasks=[...])``."""
    modules: tuple[str, ...] | None = None
    """Modules to place where size alone tells the wrong ones; None where it tells the right ones."""
