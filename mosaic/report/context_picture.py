"""A table of load balancers for one sequence, and a picture of its mask with tiles coloured by rank.

::

    headtail: 1.94 x the mean        lpt: 1.00 x the mean
    |r0                            |r0
    |..r1                          |..r1            rows are queries, columns keys
    |....r1                        |....r0          a darker tile: all its pairs are visible
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mosaic.context.plan import ContextPlan
from mosaic.report.figure import colors_of, new_figure, save_figure, shorten
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

_PANEL = 4.6


def context_table(plans: Sequence[ContextPlan]) -> Table:
    """Returns a row per plan of one sequence, the first in bold."""
    first = plans[0]
    shares = (">max work\n× mean", ">max tokens\n× mean", ">max received\n% of remote")
    rows = []
    for plan in plans:
        tokens = np.bincount(plan.distribution.rank_of, minlength=plan.ranks)
        share = plan.received_blocks(plan.needed()).max() / max(1, plan.received_blocks().max())
        cells = (f"{plan.imbalance:.4f}", f"{tokens.max() / tokens.mean():.3f}", f"{100 * share:.0f}")
        rows.append((plan.distribution.method, str(plan.distribution.chunk), *cells))
    title = f"{first.mask.num_tokens} tokens over {first.ranks} ranks, {first.pairs.sum():.3g} visible pairs"
    return make_table(title, ("method", ">blocks a\nchunk", *shares), rows, caption="counted, not measured", bold=(0,))


def draw_context(plans: Sequence[ContextPlan], path: Path) -> None:
    """Draws the mask of one sequence as divided by plans: a pixel per tile in the colour of the query's rank.

    Args:
        plans: One or a few plans of one sequence.
        path: A ``.png`` or ``.svg`` file, written atomically.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: The suffix is not ``.png`` or ``.svg``.
    """
    colors = colors_of(f"rank {rank}" for rank in range(plans[0].ranks))
    legend = dict([*colors.items()][:8]) | {"lighter: partially visible tiles": ""}
    title = f"Attention mask: {plans[0].mask.num_tokens} tokens"
    figure = new_figure([_PANEL], title=title, width=len(plans) * (_PANEL + 0.8), legend=legend)
    figure.axes[0].remove()
    shades = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in colors.values()])
    for axes, plan in zip(figure.subplots(1, len(plans), squeeze=False)[0], plans, strict=True):
        count = plan.blocks.num_blocks
        tiles = plan.blocks.tiles(np.arange(count))
        rows = np.repeat(np.arange(count), np.diff(tiles.offsets))
        full = shades[plan.distribution.rank_of[rows]]
        pixels = np.ones((count, count, 3))
        pixels[rows, tiles.columns] = np.where(np.asarray(tiles.is_full)[:, None], full, 0.45 * full + 0.55)
        tokens = count * plan.blocks.block
        axes.imshow(pixels, extent=(0, tokens, tokens, 0), interpolation="nearest", aspect="auto")
        axes.set(xlabel="key", ylabel="query")
        text = f"{plan.distribution.method}: the busiest rank has {plan.imbalance:.3f} × the mean work"
        axes.set_title(shorten(text, _PANEL), loc="left", fontsize=10.5)
    save_figure(figure, path)
