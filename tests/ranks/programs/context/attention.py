"""Attends over sequences on any number of ranks, beside dense attention on the whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from attention_cases import MASKS, attended, cases, dense, inputs_of

from bench.papers.masks import DRAWN
from mosaic.context import share_items
from mosaic.context.attention import Attend, gather_items, sum_gradients
from mosaic.context.plan import plan_context
from mosaic.errors import RankFailedError
from ranks.begun import join


def compare(rank: int, size: int, folder: Path) -> None:
    """Leaves by how much each case differs from dense attention, and hashes of what has the same bits everywhere."""
    join(rank, size, folder)
    expected = {name: dense(mask, inputs_of(mask, torch.float64)) for name, mask in MASKS.items()}
    found = {}
    for case in cases():
        attend = Attend(case.plan(size))
        exact = attended(attend, inputs_of(MASKS[case.mask], torch.float64))
        summed = [summed_over_ranks(one) for one in exact]
        pairs = zip(summed, expected[case.mask], strict=True)
        runs = [attended(attend, inputs_of(MASKS[case.mask], torch.float32)) for _ in range(2)]
        single = [summed_over_ranks(one) for one in runs[0][:2]]
        found[str(case)] = {
            "differs by": [float((own - other).abs().max()) for own, other in pairs],
            "out and dq": [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in single],
            "same twice": all(torch.equal(one, other) for one, other in zip(runs[0][2:], runs[-1][2:], strict=True)),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def summed_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Each token is of one rank, and zero on the others."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def disagree(rank: int, size: int, folder: Path) -> None:
    """Rank 1 has another sequence than the others: all are told before anything is exchanged."""
    join(rank, size, folder)
    plan = plan_context(DRAWN["mp"](300, int(rank == 1)), size, block=16)
    try:
        Attend(plan)
    except RankFailedError as error:
        (folder / f"rank{rank}.json").write_text(json.dumps([list(error.ranks), str(error)]))
    missing_modality(rank, folder)
    shared_items(rank, size, folder)


def missing_modality(rank: int, folder: Path) -> None:
    """A tower that one rank alone has met: gradients are summed and nobody waits."""
    tower, backbone, unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    for module in (tower, backbone):
        torch.nn.init.ones_(module.weight)
    out = backbone(torch.ones(1, 3))
    if rank == 0:
        out = out + tower(torch.ones(1, 3))
    out.sum().backward()
    sum_gradients([*tower.parameters(), *backbone.parameters(), *unused.parameters()])
    grads = [
        None if module.weight.grad is None else module.weight.grad.tolist() for module in (tower, backbone, unused)
    ]
    (folder / f"summed{rank}.json").write_text(json.dumps(grads))


def shared_items(rank: int, size: int, folder: Path) -> None:
    """Two images over three ranks, of which one has none: features and gradients beside one process that has both."""
    rows = (3, 5)
    draw = torch.Generator().manual_seed(0)
    pixels, weights = torch.randn(8, 4, generator=draw).double(), torch.randn(size, 8, 2, generator=draw).double()
    torch.manual_seed(0)
    encoder = torch.nn.Linear(4, 2).double()
    share = share_items(rows, size)
    own = pixels[share.places_of(rank)]
    made = encoder(own) if len(own) else own.new_zeros(0, 2)  # without items no encoder is called
    features = gather_items(made, share)
    (features * weights[rank]).sum().backward()  # each rank's tokens read the features otherwise
    sum_gradients(encoder.parameters())
    summed = encoder.weight.grad.clone()
    encoder.zero_grad()
    expected = encoder(pixels)
    (expected * weights.sum(0)).sum().backward()
    found = [float((summed - encoder.weight.grad).abs().max()), float((features - expected).detach().abs().max())]
    (folder / f"items{rank}.json").write_text(json.dumps([*found, len(share.items_of(rank))]))
