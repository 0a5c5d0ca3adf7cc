"""Terminal table of load balancers of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mosaic.context.plan import ContextPlan
from mosaic.report.frame import empty_table, plain

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    ("method", False),
    ("blocks a\nchunk", True),
    ("work: most\n× mean", True),
    ("tokens: most\n× mean", True),
    ("received: most\n% of gathering all", True),
)


def context_table(plans: Sequence[ContextPlan]) -> Table:
    """Returns a row per plan of one sequence, the first in bold."""
    first = plans[0]
    caption = f"{first.mask.num_tokens} tokens over {first.ranks} ranks, {first.work.sum():.3g} visible pairs"
    table = empty_table(caption, "counted, not measured", _COLUMNS)
    for plan in plans:
        table.add_row(*plain(_cells(plan), "bold" if plan is first else ""))
    return table


def _cells(plan: ContextPlan) -> list[str]:
    counts = np.bincount(plan.distribution.rank_of, minlength=plan.ranks)
    everything = max(1, plan.received_blocks().max())
    share = plan.received_blocks(plan.needed()).max() / everything
    return [
        plan.distribution.method,
        str(plan.distribution.chunk),
        f"{plan.imbalance:.4f}",
        f"{counts.max() / counts.mean():.3f}",
        f"{100 * share:.0f}",
    ]
