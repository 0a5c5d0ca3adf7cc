"""Modules whose parameters only others use: a table of embeddings that the model looks up itself, a tied head."""

from __future__ import annotations

import pytest
import torch
from engine_cases import Record, TwoTowers, pair_batch, run_both, tower
from torch import nn

from mosaic.engine import find_modules


class Language(nn.Module):
    """A language model that takes ids or embeddings, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = tower()

    def forward(self, ids: torch.Tensor | None = None, embeddings: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(self.table(ids) if embeddings is None else embeddings)


class Merging(TwoTowers):
    """Looks its tokens up, merges what the left tower saw into them, and gives the result to the language model."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tower(8, 8), Language())
        self.head = nn.Linear(8, 11, bias=False)
        self.narrow = nn.Parameter(torch.randn(16, 8))
        if tied:
            self.head.weight = self.right.table.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ids = (y.abs() * 3).long().clamp(max=10)
        if len(x) == 0:
            return self.right(ids).mean(1) @ self.narrow
        embeddings = self.right.table(ids)
        embeddings = torch.where(torch.arange(8)[:, None] < 3, self.left(x)[:, None], embeddings)
        return self.head(self.right(embeddings=embeddings).mean(1) @ self.narrow)


def loop(rows: tuple[int, ...], forwards: int = 1):
    def run(model: nn.Module, record: Record) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(6):
            for index in range(forwards):
                x, y = pair_batch(10 * step + index)
                loss = model(x[: rows[step % len(rows)]], y).square().mean()
                loss.backward()
                record.note(loss)
            record.note_model(model, optimizer)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return run


CHOICE = {"include": ["left", "right"]}
STAGES = [{"left": 1}, {"right": 1}]


@pytest.mark.parametrize(("tied", "forwards"), [(False, 3), (True, 1)])
def test_a_language_model_is_placed_though_its_table_is_used_outside(tied: bool, forwards: int):
    described = run_both(lambda: Merging(tied=tied), pair_batch(), STAGES, loop((6,), forwards), **CHOICE)
    assert "in place" not in described


def test_a_call_that_uses_the_table_inside_runs_in_place_and_says_so():
    described = run_both(Merging, pair_batch(), STAGES, loop((6, 0)), **CHOICE)
    assert "right ran in place" in described


def test_a_tied_head_runs_in_place_and_the_language_model_does_not():
    finding = find_modules(Merging(tied=True), pair_batch(), include=["left", "right", "head"])
    assert finding.in_place.keys() == {"head"}
    assert finding.in_place["head"].startswith("shares weight with the rest of the model (")
    assert finding.parted["right"]
    assert not finding.parted["left"]
