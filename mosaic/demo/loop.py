"""An ordinary training loop and evaluation; nothing here knows of Mosaic."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mosaic.demo.data import Split, whole
from mosaic.demo.model import contrastive_loss

_DIRECTIONS = (("image", "text"), ("text", "image"), ("image", "audio"), ("audio", "image"), ("audio", "text"))


def train(model: nn.Module, batches: Iterable[dict[str, Tensor]], optimizer: Optimizer) -> list[float]:
    """Trains on every batch once; returns the losses."""
    model.train()
    losses = []
    for batch in batches:
        loss = contrastive_loss(model(**batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def retrieval(model: nn.Module, split: Split) -> dict[str, float]:
    """Measures how often the nearest sample of another modality is the right one (R@1).

    Returns:
        A share for each of ``image->text``, ``text->image``, ``image->audio``, ``audio->image`` and ``audio->text``
        (which no loss ever compared), and ``chance``, what guessing would reach.
    """
    was_training = model.training
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    with torch.no_grad():
        features = model(**{name: tensor.to(device) for name, tensor in whole(split).items()})
    model.train(was_training)
    right = torch.arange(len(split.strings), device=device)
    found = {}
    for query, answer in _DIRECTIONS:
        nearest = (features[query] @ features[answer].T).argmax(dim=1)
        found[f"{query}->{answer}"] = (nearest == right).double().mean().item()
    return {**found, "chance": 1 / len(right)}
