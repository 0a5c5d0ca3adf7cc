"""Terminal table of time, memory and bytes of sequences that pipeline ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.pipelining.workload.layers import PipelineModel
from mosaic.pipelining.workload.microbatch import Microbatch
from mosaic.pipelining.workload.transformer import TransformerModule
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    ("module", False),
    ("tokens\na rank", True),
    ("work: most\n× mean", True),
    ("forward, backward\nms", True),
    ("received\nMB", True),
    ("fetched\nMB", True),
    ("kept\nMB", True),
)


def context_cost_table(model: PipelineModel, microbatches: Sequence[Microbatch]) -> Table:
    """Returns a row per module: one layer, with a rank's largest part of a microbatch.

    Forward receives keys and values, and backward receives them again and returns their gradients in 32 bits, twice as
    many bytes. Fetched is the memory of both at a time, in backward.
    """
    caption = (
        "a layer of the largest microbatch; what a forward receives, a backward receives too, and gives twice back"
    )
    table = empty_table("Sequences shared by context ranks, simulated", caption, _COLUMNS)
    for module in model.modules:
        if isinstance(module, TransformerModule):
            loads = [
                module.writer(microbatch, units).context_tokens if (units := module.units(microbatch)) else 0
                for microbatch in microbatches
            ]
            if any(loads):
                table.add_row(*plain(_cells(module, microbatches[loads.index(max(loads))]), ""))
    return table


def _cells(module: TransformerModule, microbatch: Microbatch) -> list[str]:
    units = module.units(microbatch)
    layers, writer = module.layers(microbatch, units), module.writer(microbatch, units)
    layer = layers[len(layers) // 2]
    share, fetched = writer.share, module.fetched(microbatch, units)
    received, together = "-", "-"
    if fetched is not None:
        received = f"{fetched.groups * fetched.received_bytes / 1e6:.1f}"
        together = f"{min(2, fetched.groups) * (fetched.num_bytes + fetched.gradient_bytes) / 1e6:.1f}"
    return [
        module.name,
        str(writer.context_tokens),
        "-" if share is None else f"{share.imbalance:.3f}",
        f"{layer.forward_ms:.2f}, {layer.backward_ms + layer.weights_ms:.2f}",
        received,
        together,
        f"{layer.strategies[0].kept_bytes / 1e6:.1f}",
    ]
