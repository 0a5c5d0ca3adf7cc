"""The six models that are measured: ``mosaic.models`` at the paper's size, cut where one H200 could not train them.

Inputs are those of Table 2, widths those of Table 1. Sixteen bytes a parameter and the activations of a batch of 8 have
to fit into 139 GiB, so the large ones have fewer layers, and vocabularies of 32,768: ``NOTES`` says what was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from mosaic import models
from mosaic.models.block import Shape

Sizes = Literal["paper", "tiny"]

_VOCABULARY = 32_768

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "clip": "ViT-L/16 and its text tower; not in Table 1",
        "qwen3-vl": "4 of 36 layers of the language model, 32,768 of 151,936 words; vision as published, 27 x 1152",
        "unified-io-2": "4 of 24 layers of the encoder and 4 of 24 of the decoder",
        "imagebind": "Table 1's three towers; depth, thermal and IMU as published",
        "ofasys": (
            "8 of 24 layers of the encoder and 4 of 12 of the decoder, 32,768 of 59,457 words; six encoders beyond "
            "Table 1's three have two layers each, which is our choice"
        ),
        "ctvlm": (
            "stand-in: nothing public tells its layers; 6 of 22 layers of TinyLlama's language model beside 3 of 32 of "
            "LLaMA-2 7B's"
        ),
    }
)
"""What each model is, in order of growing complexity."""


def config_of(name: str, size: Sizes) -> Any:
    """Returns a model's configuration: as tiny as the zoo has it, or cut."""
    config = models.config_of(name, size)
    if name == "imagebind":  # what skips blocks by chance lets two runs differ, whoever runs them
        still = {tower: replace(getattr(config, tower), drop_path=0.0) for tower in ("audio", "imu")}
        config = replace(config, imu_dropout=0.0, **still)
    if size == "tiny":
        return _rehearsed(name, config)
    if name == "qwen3-vl":
        language = replace(config.language, shape=_layers(config.language.shape, 4), vocabulary=_VOCABULARY)
        return replace(config, language=language, image_id=_VOCABULARY - 2, video_id=_VOCABULARY - 1)
    if name == "unified-io-2":
        return replace(config, language=_layers(config.language, 4))
    if name == "ofasys":
        words = _VOCABULARY - config.codes - config.bins
        return replace(config, encoder=_layers(config.encoder, 8), decoder=_layers(config.decoder, 4), words=words)
    if name == "ctvlm":
        cut = {"small": 6, "large": 3}
        return replace(config, **{branch: _branch(getattr(config, branch), layers) for branch, layers in cut.items()})
    return config


def build(name: str, *, size: Sizes, device: torch.device, seed: int = 0) -> nn.Module:
    """Makes a model with random weights on a device; the same weights for the same seed."""
    return models.build(name, config=config_of(name, size), device=device, seed=seed)


def make_batch(name: str, *, size: Sizes, batch: int, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Makes a random batch with everything that the model reads and writes."""
    return models.make_batch(name, batch=batch, config=config_of(name, size), device=device, seed=seed)


def _rehearsed(name: str, config: Any) -> Any:
    """Returns a tiny configuration; those whose whole path a dry run has to see have one layer, for busy machines."""
    if name == "clip":
        return replace(config, vision=_layers(config.vision, 1), text=_layers(config.text, 1))
    if name == "ctvlm":
        one = {branch: _branch(getattr(config, branch), 1) for branch in ("small", "large")}
        return replace(
            config, **{branch: replace(made, vision=_layers(made.vision, 1)) for branch, made in one.items()}
        )
    return config


def _layers(shape: Shape, layers: int) -> Shape:
    return replace(shape, layers=layers)


def _branch(branch: Any, layers: int) -> Any:
    return replace(branch, language=replace(branch.language, shape=_layers(branch.language.shape, layers)))
