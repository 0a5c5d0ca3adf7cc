"""Terminal table of time, memory and bytes of sequences that pipeline ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mosaic.pipelining.workload.layers import PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.rank_layer import ContextCosts
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    ("module", False),
    ("tokens\na rank", True),
    ("work: most\n× mean", True),
    ("forward, backward\nms", True),
    ("received\nMB", True),
    ("kept\nMB", True),
)


@runtime_checkable
class HasContextCosts(Protocol):
    """A module that knows the costs of its shared sequences."""

    @property
    def name(self) -> str:
        """Name in the graph."""

    def context_costs(self, microbatch: Microbatch) -> ContextCosts | None:
        """Returns the costs of one layer; None if the microbatch skips the module."""


def context_cost_table(model: PipelineModel, microbatches: Sequence[Microbatch]) -> Table:
    """Returns a row per module: one layer, with a rank's largest part of a microbatch.

    Forward receives keys and values. Backward receives them again and returns their gradients in 32 bits, twice as many
    bytes.
    """
    caption = (
        "a layer of the largest microbatch; what a forward receives, a backward receives too, and gives twice back"
    )
    table = empty_table("Sequences shared by context ranks, simulated", caption, _COLUMNS)
    for module in model.modules:
        if isinstance(module, HasContextCosts):
            costs = [costs for one in microbatches if (costs := module.context_costs(one)) is not None]
            if costs:
                table.add_row(*plain(_cells(module.name, max(costs, key=lambda each: each.tokens)), ""))
    return table


def _cells(name: str, costs: ContextCosts) -> list[str]:
    layer = costs.layer
    return [
        name,
        str(costs.tokens),
        "-" if costs.imbalance is None else f"{costs.imbalance:.3f}",
        f"{layer.forward_ms:.2f}, {layer.backward_ms + layer.weights_ms:.2f}",
        f"{costs.received_bytes / 1e6:.1f}" if costs.received_bytes else "-",
        f"{layer.strategies[0].kept_bytes / 1e6:.1f}",
    ]
