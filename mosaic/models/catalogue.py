"""The zoo's one table: to add a model, write a file with a ``MODEL`` and name the file here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from mosaic.models.inputs import Draw
from mosaic.models.zoo_model import ZooModel

_FILES = (
    "clip",
    "qwen3_vl",
    "unified_io2",
    "imagebind",
    "ofasys",
    "ctvlm",
    "multitask_clip",
    "multitask_ofasys",
    "qwen_val",
)
_MODELS: tuple[ZooModel, ...] = tuple(import_module(f"mosaic.models.{file}").MODEL for file in _FILES)
MODELS: Mapping[str, ZooModel] = MappingProxyType({model.name: model for model in _MODELS})
"""By name; those of one paper in its order, that of growing complexity."""
PAPER_MODELS = tuple(name for name, model in MODELS.items() if model.workload == "mosaic")
"""Names of the six models that Mosaic's paper measures."""


def find_model(name: str) -> ZooModel:
    """Returns a model's line of the table.

    Raises:
        ValueError: There is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r} in the zoo; it has {', '.join(MODELS)}")
    return MODELS[name]


def config_of(name: str, size: str) -> Any:
    """Returns a model's configuration, a frozen dataclass.

    Raises:
        ValueError: There is no such model or size.
    """
    sizes = find_model(name).sizes
    if size not in sizes:
        raise ValueError(f"there is no size {size!r}; {name} has {', '.join(sizes)}")
    return sizes[size]


def build(
    name: str,
    size: str = "tiny",
    *,
    config: Any = None,
    freeze: Sequence[str] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Makes a model with random weights; the same ones for the same seed.

    Its forward takes a batch as keywords and returns a dictionary with ``loss``. The caller's random numbers are left
    as they were.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        config: A configuration in the place of a size's.
        freeze: Names of modules whose parameters do not train; ``find_model(name).frozen`` for what the original froze.
        device: Where it is made; ``meta`` for one without data.
        seed: Of its weights.

    Raises:
        ValueError: There is no such model or size, or ``freeze`` names what the model does not have.
    """
    zoo_model, device = find_model(name), torch.device(device)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(seed)
        model = zoo_model.make(config_of(name, size) if config is None else config)
    modules = dict(model.named_modules())
    for part in freeze:
        if part not in modules:
            has = ", ".join(child for child, _ in model.named_children())
            raise ValueError(f"{name} has no module {part!r} to freeze; it has {has}")
        modules[part].requires_grad_(False)
    return model


def make_batch(
    name: str,
    size: str = "tiny",
    *,
    batch: int = 4,
    config: Any = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **choice: Any,
) -> dict[str, Any]:
    """Draws a batch of random samples, keywords of the model's forward; the same ones for the same seed.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        batch: Samples; of each task, for models of several.
        config: A configuration in the place of a size's.
        device: Where it is made; ``meta`` for shapes alone.
        seed: Of its numbers.
        choice: What the model's own ``make_batch`` takes: ``video=True`` for qwen3-vl, ``tasks=[...]`` for those of
            several tasks.

    Raises:
        ValueError: There is no such model or size, or the batch cannot be made.
    """
    config = config_of(name, size) if config is None else config
    return find_model(name).sample(config, Draw(config.inputs, batch, torch.device(device), seed), **choice)
