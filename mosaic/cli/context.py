"""``mosaic plan --context``: divides one sequence over ranks; needs neither torch nor a GPU."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mosaic.cli.options import Json, console_beside, write_json
from mosaic.context import CONTEXT_METHODS, MaskWords, causal, plan_context
from mosaic.errors import MosaicError
from mosaic.report.context_picture import context_table, draw_context
from mosaic.user_file import import_function

MAX_BLOCKS = 8192  # counted within seconds


@dataclass(frozen=True, kw_only=True)
class ContextCommand:
    """Divide one sequence over ranks by the work of its attention, and compare load balancers.

    The mask is causal, or comes from FILE:FUNCTION, which returns a mosaic.context.MaskWords. The work is counted, not
    measured: tiles with visible pairs, or for long sequences the visible pairs.
    """

    context: int
    """Number of ranks that share the sequence."""
    mask: Annotated[str, arg(metavar="causal|FILE:FUNCTION")] = "causal"
    """causal, or a function. It takes no arguments, or the number of tokens and the seed."""
    tokens: int = 16384
    """Number of tokens, unless the function takes no arguments."""
    block: int = 128
    """Tokens per block; the tokens of a block stay on one rank."""
    method: str = "lpt"
    """The load balancer."""
    seed: int = 0
    """Seed of random masks."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also draw the plan, beside headtail, as .png or .svg."""
    json: Json = None

    def execute(self) -> None:
        if min(self.context, self.tokens) < 1:
            raise ValueError(f"context={self.context}, tokens={self.tokens}; use 1 or more for each")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}; use 0 to {2**32 - 1}")
        if self.tokens > MAX_BLOCKS * self.block:
            least = -(-self.tokens // (MAX_BLOCKS * 128)) * 128
            raise ValueError(f"tokens={self.tokens} exceed {MAX_BLOCKS} blocks of {self.block}; use --block {least}")
        mask = mask_function(self.mask)(self.tokens, self.seed)
        plans = {
            name: plan_context(mask, self.context, method=name, block=self.block, seed=self.seed)
            for name in dict.fromkeys([self.method, *CONTEXT_METHODS])
        }
        console_beside(self.json).print(context_table([*plans.values()]))
        rows = [
            {"method": name, "imbalance": plan.imbalance, "visible_pairs": plan.pairs.tolist()}
            for name, plan in plans.items()
        ]
        write_json(json.dumps(rows, indent=2) + "\n", self.json)
        if self.picture is not None:
            draw_context([plans["headtail"], plans[self.method]], self.picture)


def mask_function(text: str) -> Callable[[int, int], MaskWords]:
    """Returns a function from a number of tokens and a seed to a mask: ``causal``, or FILE:FUNCTION."""
    if text == "causal":
        return lambda num_tokens, seed: causal(num_tokens)
    function = import_function(text, otherwise="causal")
    takes_arguments = bool(inspect.signature(function).parameters)

    def make(num_tokens: int, seed: int) -> MaskWords:
        try:
            mask = function(num_tokens, seed) if takes_arguments else function()
        except Exception as error:  # user code may raise anything
            raise MosaicError(f"{text} raised {type(error).__name__}: {error}") from error
        if not isinstance(mask, MaskWords):
            raise MosaicError(f"{text} returned {type(mask).__name__}; return a mosaic.context.MaskWords")
        return mask

    return make
