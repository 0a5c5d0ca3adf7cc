"""Trains the sweep's models of transformers in pipelines of two ranks that share sequences, beside the plain loop.

``python -m bench.context.sweep_models [NAME ...]``

A model ends in one word: ``equal``, ``refused`` by Mosaic, ``different`` in silence, ``crashed``, or ``no text`` to
share. Those with a mask of tokens have it in their mask words. Ends with 1 if one is different or has crashed.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Generator, nn
from torch.utils import _pytree as pytree

import mosaic
from bench.ranks.launch import on_ranks
from bench.record import Figure
from bench.sweep.catalogue import CHAINS, MODELS, functions
from bench.sweep.models.pieces import Made
from mosaic.context import ContextSettings, MaskWords, causal
from mosaic.errors import MosaicError
from mosaic.pipelining.order.search import OrderLimits
from mosaic.pipelining.planner import PlannerOptions

NOISE = 1e-8
"""Of a gradient, as a share of the length of all together."""
LOSS_NOISE = 1e-5
"""Transformers computes losses in 32 bits."""
OPTIONS = PlannerOptions(limits=OrderLimits(rollouts=50))
BLOCK, SECONDS = 4, 900.0


def main() -> None:
    """Prints how each model ends."""
    ends = Counter()
    for figure in on_ranks(partial(tried, sys.argv[1:]), 2, SECONDS):
        ends[figure.labels["outcome"]] += 1
        print(f"{figure.name}: {figure.labels['outcome']}: {figure.labels['says']}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in ends.most_common()))
    sys.exit(bool(ends["different"] + ends["crashed"]))


def tried(names: list[str], rank: int, size: int) -> Iterator[Figure]:
    """On each rank: every model in turn."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    for kinds in (CHAINS, MODELS):
        for _, name, make in functions(kinds):
            if not names or name in names:
                outcome, says = _outcome(make)
                labels = {"outcome": outcome, "says": says.replace("\n", " ")[:200]}
                yield Figure(name=name, source="measured", value=0.0, labels=labels)


def _outcome(make: Callable[[], Made]) -> tuple[str, str]:
    torch.manual_seed(0)
    model, draw = make()
    model = model.double().train()
    sample, *step = (_in_double(draw(Generator().manual_seed(seed))) for seed in range(3))
    if not {"input_ids", "labels"} <= sample.keys():
        return "no text", ""
    plain = copy.deepcopy(model)
    settings = ContextSettings(ranks=2, mask=_mask, block=BLOCK)
    pipe = None
    try:
        pipe = mosaic.pipeline(model, sample, context=settings, trial=False, options=OPTIONS)
        losses = pipe.step(step)
    except (MosaicError, ValueError) as error:
        return "refused", f"{type(error).__name__} {error}"
    except Exception as error:  # whatever it is ends as a word
        return "crashed", f"{type(error).__name__} {error}"
    finally:
        if pipe is not None:
            pipe.remove()
    expected = [_backward(plain, one, len(step)) for one in step]
    away = max(abs(own - other) for own, other in zip(losses.tolist(), expected, strict=True))
    differs = _difference(model, plain)
    is_equal = differs < NOISE and away < LOSS_NOISE
    return "equal" if is_equal else "different", f"gradients by {differs:.1e}, losses by {away:.1e}"


def _mask(microbatch: Mapping[str, Any]) -> MaskWords:
    """Every token sees those before it, in all rows alike: of padding rows differ, which is refused."""
    return causal(microbatch["input_ids"].shape[1])


def _in_double(batch: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)


def _backward(model: nn.Module, microbatch: Mapping[str, Any], count: int) -> float:
    loss = model(**microbatch).loss
    (loss / count).backward()
    return float(loss)


def _difference(model: nn.Module, plain: nn.Module) -> float:
    pairs = [
        [torch.zeros_like(one) if one.grad is None else one.grad for one in both]
        for both in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    whole = sum(float(other.square().sum()) for _, other in pairs) ** 0.5
    return max(float((own - other).norm()) for own, other in pairs) / whole


if __name__ == "__main__":
    main()
