"""The model zoo: one parametric multimodal model in the sizes of a table, and published models of transformers.

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
        ValueError: There is no such model.
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
    """Makes a model with random weights; the same ones for the same seed.

    Its forward takes a batch as keywords and returns a mapping with ``loss``. The caller's random numbers stay as they
    were.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        freeze: Names of modules whose parameters do not train; ``find_model(name).frozen`` for what the original froze.
        device: Where it is made; ``meta`` for one without data.
        seed: Of its weights.

    Raises:
        ValueError: There is no such model or size, or ``freeze`` names what the model does not have.
        MosaicError: The size comes from transformers, which is not installed.
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
    """Draws a batch of random samples, keywords of the model's forward; the same ones for the same seed.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        batch: Samples; of each task, for models of several.
        device: Where it is made; ``meta`` for shapes alone.
        seed: Of its numbers.
        tasks: Some of a model of several; all by default.

    Raises:
        ValueError: There is no such model, size or task.
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
        ValueError: The batch had nothing to learn from.
    """
    if "loss" not in output:
        raise ValueError(
            f"the model returned {', '.join(output) or 'nothing'} and no loss; give it a batch with targets"
        )
    return output["loss"]
