"""The demo's model learns what it is meant to learn, from data that it has to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="needs the extra demo")
pytest.importorskip("espeakng_loader", reason="needs the extra demo")

from mosaic.demo.data import DigitTriples, batches, load
from mosaic.demo.loop import retrieval, train
from mosaic.demo.model import TriModal


@pytest.fixture(scope="module")
def triples(tmp_path_factory: pytest.TempPathFactory) -> DigitTriples:
    return load(tmp_path_factory.mktemp("demo"))


def test_sixty_steps_retrieve_unseen_samples_well_above_chance(triples: DigitTriples) -> None:
    torch.manual_seed(0)
    model = TriModal()
    untrained = retrieval(model, triples.test)
    losses = train(model, batches(triples.train, 64, 0, 60), torch.optim.AdamW(model.parameters(), 2e-3))
    trained = retrieval(model, triples.test)
    assert trained["chance"] == 0.005
    assert untrained["image->text"] < 0.05
    assert trained["image->text"] > 0.3
    assert trained["image->audio"] > 0.2
    assert trained["audio->text"] > 0.2
    assert losses[-1] < losses[0] / 2


def test_retrieval_is_repeatable_and_leaves_the_mode_alone(triples: DigitTriples) -> None:
    torch.manual_seed(0)
    model = TriModal().train()
    assert retrieval(model, triples.test) == retrieval(model, triples.test)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_on_the_same_batches_gives_the_same_losses(triples: DigitTriples) -> None:
    losses: list[list[float]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = TriModal()
        losses.append(train(model, batches(triples.train, 96, 0, 3), torch.optim.AdamW(model.parameters(), 1e-3)))
    assert losses[0] == losses[1]


def test_retrieval_of_identical_embeddings_is_not_counted_as_right(triples: DigitTriples) -> None:
    class Same(torch.nn.Module):
        def forward(self, image: Path, audio: Path, text: Path) -> dict[str, torch.Tensor]:
            alike = torch.ones(200, 4) / 2
            return {"image": alike, "audio": alike, "text": alike}

    found = retrieval(Same(), triples.test)
    assert all(share <= 0.005 for share in found.values())
