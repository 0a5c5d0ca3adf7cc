"""Chunks draw the plain loop's random numbers, in whatever order they run."""

from __future__ import annotations

import copy

import pytest
import torch
from chained_chunks import chunks_of
from part_models import DECODERS, ENCODERS, SEVERAL_MODULES

from mosaic.parts.finding.find import find_split
from mosaic.parts.parted_model import PartedModel

WITH_DROPOUT = {
    name: case
    for name, case in (DECODERS | ENCODERS | SEVERAL_MODULES).items()
    if name in ("llama, dropout", "torch's encoder", "whisper")
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_microbatches_whose_chunks_take_turns_draw_what_the_plain_loop_draws(name: str):
    case = WITH_DROPOUT[name]
    torch.manual_seed(3)
    model = case.make()
    batches = [case.batch() for _ in range(3)]
    torch.manual_seed(5)
    wanted = [case.loss(model(**batch)).detach() for batch in batches]
    end = torch.get_rng_state()

    split = find_split(model, batches[0])
    chunks = chunks_of(*case.cuts[-1])
    ranks = [PartedModel(copy.deepcopy(model), split, chunks, own=[i]) for i in range(len(chunks))]
    torch.manual_seed(5)
    states = []
    for batch in batches:
        states.append(torch.get_rng_state())
        ranks[0].skip_random_numbers(batch)
    assert torch.equal(torch.get_rng_state(), end)

    made = [dict[str, tuple[torch.Tensor, ...]]() for _ in batches]
    for index, rank in enumerate(ranks):
        for number in (2, 0, 1):
            torch.set_rng_state(states[number])
            received = {module: made[number][module] for module in split.entries(chunks[index])}
            out = rank.forward(index, batches[number], received, draws="all")
            if split.leaves(chunks[index]):
                made[number] |= out
            else:
                assert torch.equal(case.loss(out).detach(), wanted[number])
