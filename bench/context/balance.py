"""How even ranks are by each method and by others' rules, and what a rank receives against gathering everything."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.record import Figure, missing_figure
from mosaic.context.distribute import CONTEXT_METHODS, Distribution, distribute
from mosaic.context.drawn import DRAWN, multimodal_packed
from mosaic.context.plan import ContextPlan
from mosaic.context.tiles import MaskBlocks, Work

COMPARED = tuple(name for name, one in CONTEXT_METHODS.items() if one.is_compared)


def balance(kind: str, tokens: int, ranks: int, masks: int) -> Iterator[Figure]:
    """Pairs of the rank with most over the mean, of several drawn masks; and tokens, where counts are unequal."""
    found: dict[str, list[float]] = {}
    tokens_most = []
    for seed in range(masks):
        blocks = MaskBlocks(mask=DRAWN[kind](tokens, seed))
        work = blocks.work()
        for method in COMPARED:
            chunk = None if method != "lpt" else 1
            shared = distribute(work, ranks, method, chunk=chunk, seed=seed)
            found.setdefault(method, []).append(shared.imbalance(work))
            if method == "lpt-paper":
                counts = np.bincount(shared.rank_of, minlength=ranks)
                tokens_most.append(float(counts.max() / counts.mean()))
        found.setdefault("torch's PTRR", []).append(_ptrr(blocks, work, ranks).imbalance(work))
    of = f"{kind}, {tokens} tokens, {ranks} ranks"
    for method, values in found.items():
        yield _spread(f"{of}: {method}: most work over mean", values)
    yield _spread(f"{of}: lpt-paper: most tokens over mean", tokens_most)


def others(tokens: int, ranks: int) -> Iterator[Figure]:
    """Competitors that do not run here, each with its reason, and what its rule is in our table."""
    if importlib.util.find_spec("magi_attention") is None:
        yield missing_figure(
            "MagiAttention's dispatcher: most work over mean",
            "it is not installed (needs Hopper to build); its rule, a heap with equal chunk counts, is lpt-equal",
            source="predicted",
        )
    documents = MaskBlocks(mask=multimodal_packed(tokens, 0)).mask.documents
    lengths = np.bincount(documents[documents >= 0]).tolist()
    name = f"mp, {tokens} tokens, {ranks} ranks: torch's per-document balancer: most work over mean"
    try:
        from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
            _PerDocumentHeadTailLoadBalancer,
        )

        _PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")._generate_indices()
    except Exception as error:  # private, and particular about lengths
        yield missing_figure(name, error, source="predicted")


def _ptrr(blocks: MaskBlocks, work: Work, ranks: int) -> Distribution:
    """Torch's own scheduling, which counts tiles of each row."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer

    counts = blocks.tile_pairs() // blocks.block**2
    groups = _PTRRLoadBalancer.ptrr_scheduling(torch.from_numpy(counts), ranks)
    rank_of = np.empty(len(work), np.int32)
    for rank, own in enumerate(groups.numpy()):
        rank_of[own] = rank
    return Distribution(rank_of=rank_of, ranks=ranks, chunk=1, method="torch's PTRR")


def received(name: str, draw: Callable[[int], MaskBlocks], ranks: int, masks: int) -> Iterator[Figure]:
    """Keys and values that a rank receives, as a share of gathering all, by chunk and for zigzag."""
    shares: dict[str, list[tuple[float, float]]] = {}
    for seed in range(masks):
        blocks = draw(seed)
        work = blocks.work()
        ways = {f"lpt, chunks of {chunk * blocks.block}": ("lpt", chunk) for chunk in (1, 4, 16)}
        ways |= {"lpt, chunk chosen": ("lpt", None), "zigzag": ("zigzag", 1)}
        for way, (method, chunk) in ways.items():
            shared = distribute(work, ranks, method, chunk=chunk)
            plan = ContextPlan(blocks=blocks, work=work, load=work, distribution=shared)
            mean = plan.received_blocks(plan.needed()).mean() / plan.received_blocks()[0]
            shares.setdefault(way, []).append((float(mean), plan.imbalance))
    for way, values in shares.items():
        of = f"{name}, {ranks} ranks, {way}"
        yield _spread(f"{of}: received over gathering all, mean of ranks", [share for share, _ in values])
        yield _spread(f"{of}: most work over mean", [imbalance for _, imbalance in values])


def _spread(name: str, values: list[float]) -> Figure:
    """Mean of several masks, with the least and the worst of them."""
    return Figure(
        name=name,
        source="predicted",
        value=float(np.mean(values)),
        samples=tuple(values),
        labels={"worst": f"{max(values):.4g}", "masks": str(len(values))},
    )
