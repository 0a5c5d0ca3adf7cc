"""The six models as data: who has which encoders, backbone and decoders, and how large.

Widths and, where one H200 holds it at a batch of 8, layers are those of the paper's Table 1; ``note`` says what was
scaled down. Inputs follow Table 2: 2,048 tokens of text, images of 512 x 512, 32 frames of video, 8 s of audio and IMU,
depth of 224 x 224, thermal of 256 x 256, 256 actions. Patches are 16 wide, since 512 is no multiple of 14.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from bench.multimodal.models import Aligned, Fused, Pair
from bench.multimodal.towers import Encoder, Modality, TowerSize, Trunk

Sizes = Literal["paper", "tiny"]

_VOCABULARY = 32_768
_IDS = {"text": 2048, "action": 256, "phone": 256, "struct": 512, "category": 16}

MODALITIES: Mapping[str, Modality] = MappingProxyType(
    {
        **{
            name: Modality(kind="ids", shape=(count,), vocabulary=_VOCABULARY if name == "text" else 1024)
            for name, count in _IDS.items()
        },
        "image": Modality(kind="image", shape=(3, 512, 512), patch=(16, 16)),
        "audio": Modality(kind="spectrum", shape=(1, 128, 800), patch=(16, 16)),
        "depth": Modality(kind="image", shape=(1, 224, 224), patch=(16, 16)),
        "thermal": Modality(kind="image", shape=(1, 256, 256), patch=(16, 16)),
        "imu": Modality(kind="signal", shape=(6, 800), patch=(8,)),
        "video": Modality(kind="video", shape=(3, 32, 512, 512), patch=(2, 64, 64)),
        "box": Modality(kind="boxes", shape=(16, 4)),
    }
)
"""Inputs at the sizes of Table 2; audio as 128 mel bands at 10 ms."""

TINY: Mapping[str, Modality] = MappingProxyType(
    {
        **{name: Modality(kind="ids", shape=(8,), vocabulary=64) for name in _IDS},
        "image": Modality(kind="image", shape=(3, 32, 32), patch=(16, 16)),
        "audio": Modality(kind="spectrum", shape=(1, 32, 32), patch=(16, 16)),
        "depth": Modality(kind="image", shape=(1, 32, 32), patch=(16, 16)),
        "thermal": Modality(kind="image", shape=(1, 32, 32), patch=(16, 16)),
        "imu": Modality(kind="signal", shape=(6, 32), patch=(8,)),
        "video": Modality(kind="video", shape=(3, 4, 32, 32), patch=(2, 16, 16)),
        "box": Modality(kind="boxes", shape=(4, 4)),
    }
)
"""The same kinds of input, as small as they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model."""

    encoders: Mapping[str, tuple[int, int, int]]
    """Layers, width and heads of each modality's tower."""
    backbone: tuple[int, int, int] | None = None
    """Layers, width and heads; None for models that align their encoders."""
    decoders: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Layers, width and heads of each decoder; its targets are as many as its modality has tokens."""
    second: ModelSpec | None = None
    """The other model of a pair."""
    align_width: int = 1024
    """Width of the common space of encoders that are aligned."""
    note: str = ""
    """Where it is not the paper's model."""


MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "clip": ModelSpec(
            encoders={"image": (24, 1024, 16), "text": (12, 768, 12)},
            note="ViT-L/16 and its text tower; not in Table 1",
        ),
        "qwen3-vl": ModelSpec(
            encoders={"image": (27, 1152, 16), "text": (0, 4096, 32)},
            backbone=(4, 4096, 32),
            decoders={"text": (0, 4096, 32)},
            note="4 of 36 layers of the backbone, 32,768 of 151,936 words; vision as published, 27 x 1152",
        ),
        "unified-io-2": ModelSpec(
            encoders={"image": (11, 768, 12), "audio": (11, 768, 12), "text": (0, 3072, 24)},
            backbone=(8, 3072, 24),
            decoders={"text": (0, 3072, 24), "image": (2, 768, 12), "audio": (2, 512, 8)},
            note="8 of 48 layers of the backbone; decoders are small stand-ins",
        ),
        "imagebind": ModelSpec(
            encoders={
                "image": (24, 1024, 16),
                "text": (12, 768, 12),
                "audio": (12, 768, 12),
                "depth": (12, 384, 8),
                "thermal": (12, 768, 12),
                "imu": (6, 512, 8),
            },
            note="Table 1's three towers; depth, thermal and IMU as published",
        ),
        "ofasys": ModelSpec(
            encoders={
                "image": (8, 1280, 16),
                "text": (4, 1280, 16),
                "audio": (6, 1280, 16),
                "video": (8, 1280, 16),
                "action": (4, 1280, 16),
                "phone": (2, 1280, 16),
                "struct": (2, 1280, 16),
                "box": (2, 1280, 16),
                "category": (2, 1280, 16),
            },
            backbone=(12, 1280, 16),
            decoders={"text": (2, 1280, 16), "image": (2, 1280, 16), "audio": (2, 1280, 16), "action": (2, 1280, 16)},
            note="12 of 36 layers of the backbone, 4 of 6 decoders; six encoders beyond Table 1's three are stand-ins",
        ),
        "ctvlm": ModelSpec(
            encoders={"image": (12, 768, 12), "text": (0, 2048, 16)},
            backbone=(6, 2048, 16),
            decoders={"text": (0, 2048, 16)},
            second=ModelSpec(
                encoders={"image": (24, 1024, 16), "text": (0, 4096, 32)},
                backbone=(3, 4096, 32),
                decoders={"text": (0, 4096, 32)},
            ),
            note="stand-in: nothing public tells its layers; a small and a large vision-language model that distil",
        ),
    }
)
"""In order of growing complexity."""


def build(name: str, *, size: Sizes, device: torch.device, seed: int = 0) -> nn.Module:
    """Makes a model with random weights on a device; the same weights for the same seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        return _build(MODELS[name], size)


def make_batch(name: str, *, size: Sizes, batch: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Makes a random batch: inputs by modality, and targets for each decoder."""
    spec = MODELS[name]
    kinds = MODALITIES if size == "paper" else TINY
    draw = torch.Generator(device).manual_seed(seed)

    def ids(modality: Modality, count: int) -> torch.Tensor:
        most = modality.vocabulary or kinds["text"].vocabulary
        return torch.randint(0, most, (batch, count), generator=draw, device=device)

    made = {}
    for modality in spec.encoders:
        kind = kinds[modality]
        if kind.kind == "ids":
            made[modality] = ids(kind, kind.shape[0])
        else:
            made[modality] = torch.randn(batch, *kind.shape, generator=draw, device=device)
    for modality in spec.decoders:
        made[f"{modality}_targets"] = ids(kinds[modality], kinds[modality].num_tokens)
    return made


def _build(spec: ModelSpec, size: Sizes) -> nn.Module:
    if spec.second is not None:
        return Pair(_fused(spec, size), _fused(spec.second, size))
    if spec.backbone is not None:
        return _fused(spec, size)
    out = spec.align_width if size == "paper" else 16
    return Aligned(
        {
            name: _encoder(name, tower, out, size, pooled=True, causal=name == "text")
            for name, tower in spec.encoders.items()
        }
    )


def _fused(spec: ModelSpec, size: Sizes) -> Fused:
    assert spec.backbone is not None
    backbone = _tower(spec.backbone, size)
    vocabulary = (MODALITIES if size == "paper" else TINY)["text"].vocabulary
    return Fused(
        {
            name: _encoder(name, tower, backbone.width, size, pooled=False, causal=False)
            for name, tower in spec.encoders.items()
        },
        Trunk(backbone.width, backbone, backbone.width, causal=True),
        {
            name: Trunk(backbone.width, _tower(tower, size), vocabulary, causal=True)
            for name, tower in spec.decoders.items()
        },
    )


def _encoder(
    name: str, tower: tuple[int, int, int], out_width: int, size: Sizes, *, pooled: bool, causal: bool
) -> Encoder:
    modality = (MODALITIES if size == "paper" else TINY)[name]
    return Encoder(modality, _tower(tower, size), out_width, pooled=pooled, causal=causal)


def _tower(tower: tuple[int, int, int], size: Sizes) -> TowerSize:
    layers, width, heads = tower
    if size == "tiny":
        return TowerSize(layers=min(layers, 1), width=16, heads=2)
    return TowerSize(layers=layers, width=width, heads=heads)
