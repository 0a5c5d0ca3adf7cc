"""An ordinary training loop and evaluation, without Mosaic."""

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
    """Measures the share of samples whose nearest sample of another modality is the right one (R@1).

    Returns:
        A share for each of ``image->text``, ``text->image``, ``image->audio``, ``audio->image`` and ``audio->text``
        (which no loss ever compared), and ``chance``, the share by guessing.
    """
    was_training = model.training
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.eval()
    with torch.no_grad():
        features = model(**{name: tensor.to(device) for name, tensor in whole(split).items()})
    model.train(was_training)
    right = torch.arange(len(split.strings), device=device)
    recall = {}
    for query, answer in _DIRECTIONS:
        nearest = (features[query] @ features[answer].T).argmax(dim=1)
        recall[f"{query}->{answer}"] = (nearest == right).double().mean().item()
    return {**recall, "chance": 1 / len(right)}
