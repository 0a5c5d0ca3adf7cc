"""Tiny models of transformers, each with one batch; from configurations, nothing is downloaded."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn

from transformers_models.shared_parts import MODELS

for _part in ("two_towers", "images", "language_models", "sound_and_text"):  # the order of the table
    import_module(f"transformers_models.{_part}")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Returns a model and a batch for it, always the same."""
    torch.manual_seed(0)
    settings, batch = MODELS[name]()
    kind = getattr(transformers, name)
    config = settings if isinstance(settings, transformers.PreTrainedConfig) else kind.config_class(**settings)
    return kind(config).train(), batch
