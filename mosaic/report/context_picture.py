"""A picture of a mask's tiles coloured by rank, one load balancer beside another.

::

    zigzag: 1.94 x the mean        lpt: 1.00 x the mean
    |r0                            |r0
    |..r1                          |..r1            rows are queries, columns keys
    |....r1                        |....r0          a bar at the left: what each token is
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.context.plan import ContextPlan
from mosaic.context.words import STREAM_SHIFT
from mosaic.report.canvas import Canvas, check_path
from mosaic.report.palette import FAINT, GLUE, GRID, INK, colors_of, lighter

_PANEL, _LEFT, _BETWEEN, _HEAD, _FOOT = 4.3, 0.95, 1.35, 1.05, 1.0
_STRIP = 0.1
_MAX_PAIRS = 1536
"""Tokens up to which single pairs are drawn; above, whole tiles, with partly visible ones lighter."""
_MAX_TOLD = 16
"""Most ranks with a label at their bar."""
_PARTLY = 0.55
"""Share of white in partly visible tiles."""
_Pixels = npt.NDArray[np.float64]


def draw_context(plans: ContextPlan | Sequence[ContextPlan], path: Path, *, title: str = "") -> None:
    """Draws the mask of one sequence as plans divide it, one beside the other.

    Args:
        plans: One or a few plans of one sequence.
        path: A ``.png`` or ``.svg`` file, written atomically.
        title: Written at the top.

    Raises:
        MosaicError: matplotlib is missing, or the file cannot be written.
        ValueError: There are no plans, or the suffix is another.
    """
    check_path(path)
    context_canvas([plans] if isinstance(plans, ContextPlan) else plans, title=title).save(path)


def context_canvas(plans: Sequence[ContextPlan], *, title: str = "") -> Canvas:
    """Returns the page of ``draw_context``.

    Raises:
        ValueError: There are no plans.
    """
    if not plans:
        raise ValueError("there are no plans to draw; give one at least")
    canvas = Canvas(width=_LEFT + len(plans) * (_PANEL + _BETWEEN) - 0.35, height=_HEAD + _PANEL + _FOOT)
    mask = plans[0].mask
    documents = len(np.unique(mask.documents[mask.documents >= 0]))
    shown = title or f"Who sees whom: {mask.num_tokens} tokens, {documents} document{'s' if documents != 1 else ''}"
    canvas.text(_LEFT, 0.36, shown, size=13, fontweight="bold")
    colors = colors_of(f"rank {rank}" for rank in range(plans[0].ranks))
    most = max(plan.imbalance for plan in plans)
    for index, plan in enumerate(plans):
        left = _LEFT + index * (_PANEL + _BETWEEN)
        _draw_panel(canvas, left, plan, list(colors.values()), is_first=index == 0)
        _draw_shares(canvas, left + _PANEL + 0.08, plan, list(colors.values()), most)
    _draw_legend(canvas, plans[0], is_repeating=len(set(colors.values())) < len(colors))
    return canvas


def _draw_panel(canvas: Canvas, left: float, plan: ContextPlan, colors: list[str], *, is_first: bool) -> None:
    count, block = plan.mask.num_tokens, plan.blocks.block
    canvas.text(left, 0.84, f"{plan.distribution.method}: rank with most has {plan.imbalance:.3f} × the mean")
    axes = canvas.panel(left, _HEAD, _PANEL, _PANEL)
    pixels = _pairs(plan, colors) if count <= _MAX_PAIRS else _tiles(plan, colors)
    extent = (0, plan.blocks.num_blocks * block) if count > _MAX_PAIRS else (0, count)
    axes.imshow(pixels, extent=(*extent, *extent[::-1]), interpolation="nearest", aspect="auto")
    for edge in np.flatnonzero(np.diff(plan.mask.documents)) + 1:
        axes.axhline(edge, color=FAINT, linewidth=0.4, linestyle=":")
        axes.axvline(edge, color=FAINT, linewidth=0.4, linestyle=":")
    if plan.blocks.num_blocks <= 64:
        for line in range(block, count, block):
            axes.axhline(line, color=GRID, linewidth=0.3)
    axes.set_xlim(0, count)
    axes.set_ylim(count, 0)
    axes.tick_params(axis="y", length=0, pad=2 + 72 * (_STRIP + 0.04))  # labels stand left of the strip
    axes.set_xlabel("key", color=INK)
    if is_first:
        axes.set_ylabel("query", color=INK)
    _draw_strip(canvas, left, plan)


def _draw_strip(canvas: Canvas, left: float, plan: ContextPlan) -> None:
    """Beside the queries: grey text, dark images, white padding."""
    axes = canvas.panel(left - _STRIP - 0.03, _HEAD, _STRIP, _PANEL)
    axes.axis("off")
    stream = plan.mask.words >> STREAM_SHIFT & 63
    shades = np.where(plan.mask.documents < 0, 1.0, np.where(stream == 0, 0.82, np.where(stream % 2, 0.25, 0.45)))
    axes.imshow(np.repeat(shades[:, None, None], 3, axis=2), interpolation="nearest", aspect="auto")


def _draw_shares(canvas: Canvas, left: float, plan: ContextPlan, colors: list[str], most: float) -> None:
    """Beside the panel: the work of each rank as bars, against the mean; the legend of ranks' colours too."""
    axes = canvas.panel(left, _HEAD, _BETWEEN - 0.8, _PANEL * 0.6)
    labelled = range(0, plan.ranks, -(-plan.ranks // _MAX_TOLD))
    axes.set_yticks([-rank for rank in labelled], [str(rank) for rank in labelled])
    axes.yaxis.tick_right()
    axes.tick_params(axis="y", length=0, pad=2)
    axes.set_xticks([])
    mean = max(float(plan.loads.mean()), 1.0)
    for rank, load in enumerate(plan.loads):
        canvas.bar(axes, (0, -rank - 0.4, load / mean, 0.8), colors[rank % len(colors)])
    axes.set_ylim(-plan.ranks + 0.4, 0.6)
    axes.axvline(1, color=INK, linewidth=0.6, linestyle="--")
    axes.set_xlim(0, 1.05 * most)
    axes.set_xlabel("work of\neach rank", color=FAINT)


def _draw_legend(canvas: Canvas, plan: ContextPlan, *, is_repeating: bool) -> None:
    at, low = _LEFT, canvas.height - 0.34
    axes = canvas.panel(0, 0, canvas.width, canvas.height)
    axes.axis("off")
    axes.set_xlim(0, canvas.width)
    axes.set_ylim(canvas.height, 0)
    meanings = [("text", lighter(GLUE, 0.4)), ("images", "#4a4a4a")]
    if (plan.mask.documents < 0).any():
        meanings.append(("padding", "#ffffff"))
    if plan.mask.num_tokens > _MAX_PAIRS:
        meanings.append(("lighter: tiles seen in part", ""))
    if is_repeating:
        meanings.append(("ranks' colours repeat", ""))
    for text, color in meanings:
        if color:
            canvas.bar(axes, (at, low - 0.12, 0.2, 0.14), color)
            at += 0.26
        at = canvas.text(at, low, text) + 0.22


def _pairs(plan: ContextPlan, colors: list[str]) -> _Pixels:
    """A pixel per pair, in its rank's colour if the query sees the key."""
    of_rank = np.stack([_rgb(color) for color in colors])
    owner = np.repeat(plan.distribution.rank_of, plan.blocks.block)[: plan.mask.num_tokens]
    visible = plan.mask.dense()
    return np.where(visible[:, :, None], of_rank[owner % len(colors)][:, None, :], 1.0)


def _tiles(plan: ContextPlan, colors: list[str]) -> _Pixels:
    """A pixel for each tile."""
    of_rank = np.stack([[_rgb(lighter(color, _PARTLY)), _rgb(color)] for color in colors])
    blocks = plan.blocks.num_blocks
    pixels = np.ones((blocks, blocks, 3))
    tiles = plan.blocks.tiles(np.arange(blocks))
    rows = np.repeat(np.arange(blocks), np.diff(tiles.offsets))
    pixels[rows, tiles.columns] = of_rank[plan.distribution.rank_of[rows] % len(colors), tiles.is_full]
    return pixels


def _rgb(color: str) -> npt.NDArray[Any]:
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
