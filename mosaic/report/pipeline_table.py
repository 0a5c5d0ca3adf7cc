"""Terminal tables of a planned pipeline step: beside baselines, and the costs of sequences that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mosaic.pipelining.compare import Contender, bubble_share
from mosaic.pipelining.planner import PlannedStep
from mosaic.pipelining.tasks import TaskGraph, Timed
from mosaic.pipelining.workload.layers import PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.rank_layer import ContextCosts
from mosaic.report.frame import make_table

if TYPE_CHECKING:
    from rich.table import Table


def pipeline_table(planned: PlannedStep, contenders: Sequence[Contender]) -> Table:
    """Returns simulated rows of the plan and of each baseline; a baseline that cannot run has its reason."""
    rows = [_cells("planned", planned.graph, planned.timed, 1.0, _strategies(planned))]
    for contender in contenders:
        if (run := contender.run) is None:
            rows.append([contender.name, "-", "-", "-", "-", contender.reason])
            continue
        ratio = run.timed.makespan_ns / planned.makespan_ns if planned.makespan_ns else 1.0
        rows.append(_cells(contender.name, run.graph, run.timed, ratio, run.strategy))
    numbers = ("step\nms", "× ours", "bubbles\n%", "fullest rank\nGB")
    columns = [("schedule", False), *((heading, True) for heading in numbers), ("activations", False)]
    return make_table("One step, simulated", columns, rows, caption="nothing here was measured", bold=(0,))


def _cells(name: str, graph: TaskGraph, timed: Timed, ratio: float, strategy: str) -> list[str]:
    bubbles, fullest = f"{100 * bubble_share(graph, timed):.1f}", f"{max(timed.peak_bytes) / 1e9:.1f}"
    return [name, f"{timed.makespan_ns / 1e6:.1f}", f"{ratio:.2f}", bubbles, fullest, strategy]


def _strategies(planned: PlannedStep) -> str:
    if isinstance(planned.strategies, str):
        return planned.strategies
    layers = [index for choices in planned.strategies.values() for index in choices]
    changed = sum(index > 0 for index in layers)
    return f"keep, but for {changed / len(layers):.0%} of layers" if layers else "keep"


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
    rows = []
    for module in model.modules:
        if isinstance(module, HasContextCosts):
            costs = [each for one in microbatches if (each := module.context_costs(one)) is not None]
            if costs:
                rows.append(_cost_cells(module.name, max(costs, key=lambda each: each.tokens)))
    numbers = ("tokens\na rank", "work: most\n× mean", "forward, backward\nms", "received\nMB", "kept\nMB")
    columns = [("module", False), *((heading, True) for heading in numbers)]
    caption = "one layer of the largest microbatch; backward receives as much as forward, and returns twice as much"
    return make_table("Sequences shared by context ranks, simulated", columns, rows, caption=caption)


def _cost_cells(name: str, costs: ContextCosts) -> list[str]:
    layer = costs.layer
    return [
        name,
        str(costs.tokens),
        "-" if costs.imbalance is None else f"{costs.imbalance:.3f}",
        f"{layer.forward_ms:.2f}, {layer.backward_ms + layer.weights_ms:.2f}",
        f"{costs.received_bytes / 1e6:.1f}" if costs.received_bytes else "-",
        f"{layer.strategies[0].kept_bytes / 1e6:.1f}",
    ]
