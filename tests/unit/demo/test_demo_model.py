"""The demo's model and loss, on made-up inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mosaic.demo.model import TriModal, contrastive_loss


@pytest.fixture
def model() -> TriModal:
    torch.manual_seed(0)
    return TriModal()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    text = torch.randint(1, 29, (6, 31), generator=random)
    text[:, 20:] = 0
    return {
        "image": torch.randn(6, 1, 8, 24, generator=random),
        "audio": torch.randn(6, 40, 96, generator=random),
        "text": text,
    }


def test_every_parameter_gets_a_gradient(model: TriModal, batch: dict[str, Tensor]) -> None:
    contrastive_loss(model(**batch)).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_padding_tokens_draw_no_attention(model: TriModal, batch: dict[str, Tensor]) -> None:
    """What the embedding of padding holds never reaches the result."""
    model.eval()
    before = model(**batch)["text"]
    with torch.no_grad():
        model.text.embedding.weight[0] += 100
    assert torch.equal(before, model(**batch)["text"])


def test_loss_of_a_perfect_match_is_near_zero_and_of_no_information_is_log_n() -> None:
    corners = torch.eye(4)
    scale = torch.tensor(50.0)
    perfect = contrastive_loss({"image": corners, "audio": corners, "text": corners, "scale": scale})
    alike = torch.ones(4, 4) / 2
    blind = contrastive_loss({"image": alike, "audio": alike, "text": alike, "scale": scale})
    assert perfect.item() < 1e-6
    assert blind.item() == pytest.approx(math.log(4))
