"""A table of load balancers of one sequence, and a picture of its mask's tiles coloured by rank.

::

    headtail: 1.94 x the mean        lpt: 1.00 x the mean
    |r0                            |r0
    |..r1                          |..r1            rows are queries, columns keys
    |....r1                        |....r0          a bar at the left: what each token is
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mosaic.context.plan import ContextPlan
from mosaic.context.words import STREAM_SHIFT
from mosaic.report.figure import FAINT, INK, colors_of, new_figure, save_figure, shorten
from mosaic.report.table import make_table

if TYPE_CHECKING:
    from rich.table import Table

_PANEL = 4.6
_MAX_PAIRS = 1536
"""Tokens up to which single pairs are drawn; above, whole tiles, with partly visible ones lighter."""
_MAX_LABELS = 16
_TEXT, _IMAGES = "#d1d1d1", "#4a4a4a"


def context_table(plans: Sequence[ContextPlan]) -> Table:
    """Returns a row per plan of one sequence, the first in bold."""
    first = plans[0]
    shares = (">work: most\n× mean", ">tokens: most\n× mean", ">received: most\n% of gathering all")
    rows = []
    for plan in plans:
        tokens = np.bincount(plan.distribution.rank_of, minlength=plan.ranks)
        share = plan.received_blocks(plan.needed()).max() / max(1, plan.received_blocks().max())
        cells = (f"{plan.imbalance:.4f}", f"{tokens.max() / tokens.mean():.3f}", f"{100 * share:.0f}")
        rows.append((plan.distribution.method, str(plan.distribution.chunk), *cells))
    title = f"{first.mask.num_tokens} tokens over {first.ranks} ranks, {first.work.sum():.3g} visible pairs"
    return make_table(title, ("method", ">blocks a\nchunk", *shares), rows, caption="counted, not measured", bold=(0,))


def draw_context(plans: Sequence[ContextPlan], path: Path, *, title: str = "") -> None:
    """Draws the mask of one sequence as plans divide it, one beside the other: tokens, mask, work of the ranks.

    Args:
        plans: One or a few plans of one sequence.
        path: A ``.png`` or ``.svg`` file, written atomically.
        title: Written at the top.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: The suffix is another.
    """
    mask, count = plans[0].mask, plans[0].mask.num_tokens
    documents = len(np.unique(mask.documents[mask.documents >= 0]))
    title = title or f"Who sees whom: {count} tokens, {documents} document{'s' if documents != 1 else ''}"
    colors = [*colors_of(f"rank {rank}" for rank in range(plans[0].ranks)).values()]
    legend = {"text": _TEXT, "images": _IMAGES}
    legend |= {"padding": "#ffffff"} if (mask.documents < 0).any() else {}
    legend |= {"lighter: tiles seen in part": ""} if count > _MAX_PAIRS else {}
    legend |= {"ranks' colours repeat": ""} if len(set(colors)) < len(colors) else {}
    figure = new_figure([_PANEL], title=title, width=max(8.0, len(plans) * (_PANEL + 1.6)), legend=legend)
    figure.axes[0].remove()
    panels = figure.subplots(1, 3 * len(plans), squeeze=False, width_ratios=(0.1, _PANEL, 0.7) * len(plans))[0]
    most = max(plan.imbalance for plan in plans)
    for plan, tokens, axes, work in zip(plans, panels[::3], panels[1::3], panels[2::3], strict=True):
        stream = plan.mask.words >> STREAM_SHIFT & 63
        grey = np.where(plan.mask.documents < 0, 1.0, np.where(stream == 0, 0.82, np.where(stream % 2, 0.25, 0.45)))
        tokens.imshow(grey[:, None], cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        tokens.set(xticks=(), ylabel="query")
        tokens.spines[:].set_visible(False)
        _draw_mask(axes, plan, colors)
        work.barh(range(plan.ranks), plan.loads / max(float(plan.loads.mean()), 1.0), color=colors)
        work.axvline(1, color=INK, linewidth=0.6, linestyle="--")
        labelled = range(0, plan.ranks, -(-plan.ranks // _MAX_LABELS))
        work.set(yticks=labelled, yticklabels=map(str, labelled), xticks=(), xlabel="work of\neach rank")
        work.set(xlim=(0, 1.05 * most), ylim=(plan.ranks - 0.4, -0.6))
        work.yaxis.tick_right()
        work.tick_params(axis="y", length=0)
        work.spines[:].set_visible(False)
    save_figure(figure, path)


def _draw_mask(axes: Any, plan: ContextPlan, colors: Sequence[str]) -> None:
    """Draws a pixel per pair of tokens in the colour of the query's rank if the query sees the key; or per tile."""
    shades = np.array([[int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)] for color in colors])
    count, block, blocks = plan.mask.num_tokens, plan.blocks.block, plan.blocks.num_blocks
    if count <= _MAX_PAIRS:
        size = count
        owner = np.repeat(plan.distribution.rank_of, block)[:count]
        pixels = np.where(plan.mask.dense()[:, :, None], shades[owner][:, None, :], 1.0)
    else:
        size, pixels = blocks * block, np.ones((blocks, blocks, 3))
        tiles = plan.blocks.tiles(np.arange(blocks))
        rows = np.repeat(np.arange(blocks), np.diff(tiles.offsets))
        full = shades[plan.distribution.rank_of[rows]]
        pixels[rows, tiles.columns] = np.where(np.asarray(tiles.is_full)[:, None], full, 0.45 * full + 0.55)
    axes.imshow(pixels, extent=(0, size, size, 0), interpolation="nearest", aspect="auto")
    edges = np.flatnonzero(np.diff(plan.mask.documents)) + 1
    axes.hlines(edges, 0, count, color=FAINT, linewidth=0.4, linestyle=":")
    axes.vlines(edges, 0, count, color=FAINT, linewidth=0.4, linestyle=":")
    axes.set(xlim=(0, count), ylim=(count, 0), xlabel="key", yticks=())
    text = f"{plan.distribution.method}: rank with most has {plan.imbalance:.3f} × the mean"
    axes.set_title(shorten(text, _PANEL), loc="left", fontsize=10.5)
