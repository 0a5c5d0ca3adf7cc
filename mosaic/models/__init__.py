"""The model zoo: a parametric multimodal model in the sizes of a table, and published models of transformers.

::

    model = models.build("imagebind", size="tiny")
    loss = models.loss_of(model(**models.make_batch("imagebind", size="tiny")))

``rows`` has the table: the main paper's six models, Spindle's three workloads, PipeWeaver's T2V, and LLaVA.
``multimodal`` has the model.
Weights and samples are random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mosaic.errors import unknown
from mosaic.models.multimodal import Draw
from mosaic.models.rows import MODELS, PAPER_MODELS, Row, Size

__all__ = ["MODELS", "PAPER_MODELS", "Row", "build", "find_model", "loss_of", "make_batch"]


def find_model(name: str) -> Row:
    """Returns a model's row of the table.

    Raises:
        ValueError: The model is unknown.
    """
    if name not in MODELS:
        raise ValueError(unknown("model", name, MODELS))
    return MODELS[name]


def build(
    name: str,
    size: str = "tiny",
    *,
    freeze: Sequence[str] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Creates a model with random weights, reproducible by seed.

    Its forward takes a batch as keywords and returns a mapping with ``loss``. The caller's random state is preserved.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        freeze: Names of modules to freeze; ``find_model(name).frozen`` has those of the original training.
        device: Device of the model; ``meta``: without data.
        seed: Seed of its weights.

    Raises:
        ValueError: The model or size is unknown, or ``freeze`` has an unknown module.
        MosaicError: The size needs transformers, which is not installed.
    """
    config, device = _config_of(name, size), torch.device(device)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(seed)
        model = config.make()
    modules = dict(model.named_modules())
    for part in freeze:
        if part not in modules:
            raise ValueError(unknown(f"module of {name}", part, [child for child, _ in model.named_children()]))
        modules[part].requires_grad_(False)
    return model


def make_batch(
    name: str,
    size: str = "tiny",
    *,
    batch: int = 4,
    device: torch.device | str = "cpu",
    seed: int = 0,
    tasks: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Draws a random batch, keywords of the model's forward, reproducible by seed.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        batch: Number of samples (per task).
        device: Device of the batch; ``meta``: only shapes.
        seed: Seed of its numbers.
        tasks: Tasks of the batch; by default all.

    Raises:
        ValueError: The model, size or task is unknown.
    """
    return _config_of(name, size).sample(Draw(batch, torch.device(device), seed), tasks)


def _config_of(name: str, size: str) -> Size:
    sizes = find_model(name).sizes
    if size not in sizes:
        raise ValueError(unknown(f"size of {name}", size, sizes))
    return sizes[size]


def loss_of(output: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss of a model's output.

    Raises:
        ValueError: The output has no loss.
    """
    if "loss" not in output:
        raise ValueError(
            f"the model returned {', '.join(output) or 'nothing'} without a loss; pass a batch with targets"
        )
    return output["loss"]
