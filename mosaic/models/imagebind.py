"""ImageBind: six modalities bound together by images (Girdhar et al. 2023).

``public`` is ``imagebind_huge``: 1,200.8 M parameters, published as 1.2 B. The paper's Table 1 calls its ImageBind 1.2
B, too, but lists vision of 24 x 1024, audio and text of 12 x 768. These are the defaults of the original's class, a
model of 641.5 M (``DEFAULTS`` here); ``paper`` has these dimensions, depth, thermal and IMU as published, which the
table leaves out, and Table 2's inputs: patches 16 wide, since 512 is no multiple of 14, 2,048 tokens of text instead
of 77, 8 s of audio and of IMU instead of 2 s and 5 s. ``paper`` does without the original's stochastic depth and
dropout, so that two runs of it can be compared whatever draws their random numbers.

Vision, audio and text stand 1.7 : 0.46 : 1 in operations of ``paper`` and 4 : 2 : 1 in Table 1, which is 2,304, 4,096
and 2,048 tokens. ``table1`` has its layers, widths and ratios on Table 2's inputs, by what neither table prints:
patches of 11 x 11 and spectra cut every 5 bands and 6 frames.

The original trains with image and text frozen: ``freeze=FROZEN``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.clip import VOCABULARY
from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.block import Shape
from mosaic.models.layers.targets import contrastive_loss
from mosaic.models.layers.towers import Patches, PatchTower, TokenTower
from mosaic.models.zoo_model import ZooModel

MODALITIES = ("image", "text", "audio", "depth", "thermal", "imu")
"""In the order of the original; images are the anchor of all others."""
FROZEN = ("encoders.image", "encoders.text")
"""What the original's training leaves as OpenCLIP made it (its model card)."""
ENCODERS = tuple(f"encoders.{name}" for name in ("image", "audio", "text", "depth", "thermal", "imu"))
"""Their paths, those of Table 1 first."""
FIXED_SCALES: Mapping[str, float] = MappingProxyType({"audio": 20.0, "depth": 5.0, "thermal": 10.0, "imu": 5.0})
"""Inverse temperatures that are not learned, as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBindConfig:
    """Dimensions of an ImageBind."""

    image: Shape
    """Vision transformer, for images and videos."""
    text: Shape
    """Text transformer; attention looks back only."""
    audio: Shape
    """Transformer over spectra."""
    depth: Shape
    """Transformer over depth maps."""
    thermal: Shape
    """Transformer over thermal images."""
    imu: Shape
    """Transformer over an inertial sensor's signals."""
    patch: int
    """Height and width of an image's patch; it spans two frames."""
    out_width: int
    """Width of the common space."""
    inputs: InputSizes
    """Sizes of the samples."""
    audio_stride: tuple[int, int] = (10, 10)
    """Distance of a spectrum's patches along mel bands and frames."""
    imu_dropout: float = 0.5
    """Before IMU's projection."""
    vocabulary: int = VOCABULARY
    """Ids of the text."""

    def patches(self, modality: str) -> Patches:
        """How samples of a modality are cut."""
        sizes = self.inputs
        if modality == "image":
            return Patches(channels=3, extent=(2, sizes.image_px, sizes.image_px), patch=(2, self.patch, self.patch))
        if modality == "imu":
            return Patches(channels=sizes.imu_axes, extent=(sizes.imu_samples,), patch=(8,), norm=True)
        if modality == "audio":
            extent = (sizes.audio_mels, sizes.audio_frames)
            return Patches(channels=1, extent=extent, patch=(16, 16), stride=self.audio_stride, norm=True)
        side = sizes.depth_px if modality == "depth" else sizes.thermal_px
        return Patches(channels=1, extent=(side, side), patch=(16, 16), norm=True)


HUGE = ImageBindConfig(
    image=Shape(layers=32, width=1280, heads=16, eps=1e-6),
    text=Shape(layers=24, width=1024, heads=16, eps=1e-6),
    audio=Shape(layers=12, width=768, heads=12, eps=1e-6, bias_kv=True, drop_path=0.1),
    depth=Shape(layers=12, width=384, heads=8, eps=1e-6, bias_kv=True),
    thermal=Shape(layers=12, width=768, heads=12, eps=1e-6, bias_kv=True),
    imu=Shape(layers=6, width=512, heads=8, eps=1e-6, bias_kv=True, drop_path=0.7),
    patch=14,
    out_width=1024,
    inputs=InputSizes(image_px=224, text_tokens=77, audio_frames=204, thermal_px=224, imu_samples=2000),
)
"""``imagebind_huge``."""
DEFAULTS = replace(
    HUGE,
    image=replace(HUGE.image, layers=24, width=1024),
    text=replace(HUGE.text, layers=12, width=768, heads=12),
    out_width=768,
)
"""What the original's class makes without arguments: the dimensions that Table 1 lists."""
_PAPER = replace(
    DEFAULTS,
    audio=replace(DEFAULTS.audio, drop_path=0.0),
    imu=replace(DEFAULTS.imu, drop_path=0.0),
    patch=16,
    inputs=TABLE_2,
    imu_dropout=0.0,
)
SIZES: Mapping[str, ImageBindConfig] = MappingProxyType(
    {
        "tiny": replace(
            HUGE,
            image=HUGE.image.tiny(),
            text=HUGE.text.tiny(),
            audio=HUGE.audio.tiny(),
            depth=HUGE.depth.tiny(1),
            thermal=HUGE.thermal.tiny(),
            imu=HUGE.imu.tiny(1),
            patch=16,
            out_width=16,
            inputs=TINY,
            vocabulary=64,
        ),
        "public": HUGE,
        "paper": _PAPER,
        "table1": replace(_PAPER, patch=11, audio_stride=(5, 6)),
    }
)


class ImageBind(nn.Module):
    """Six encoders in a dictionary.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: ImageBindConfig) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: _encoder(config, name) for name in MODALITIES})
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        for name, scale in FIXED_SCALES.items():
            self.register_buffer(f"{name}_scale", torch.tensor(scale), persistent=False)

    def embed(self, modality: str, samples: Tensor) -> Tensor:
        """Returns samples of a modality in the common space, (batch, out width), rows of length one."""
        return F.normalize(self.encoders[modality](samples), dim=-1)

    def scale(self, modality: str) -> Tensor:
        """Returns the inverse temperature of a modality's loss with another."""
        if modality in FIXED_SCALES:
            return cast(Tensor, getattr(self, f"{modality}_scale"))
        return self.log_scale.exp()

    def forward(self, **samples: Tensor) -> dict[str, Tensor]:
        """Embeds what is there, and pulls everything to the images.

        Args:
            samples: Batches by modality, those of ``MODALITIES`` that there are: ``image`` (batch, 3, height, width),
                ``text`` ids (batch, tokens), ``audio`` (batch, 1, mel bands, frames), ``depth`` and ``thermal``
                (batch, 1, height, width), ``imu`` (batch, axes, samples).

        Returns:
            Each modality's embeddings; with images and something else, ``loss`` as well: the mean over the others.

        Raises:
            ValueError: A modality is unknown.
        """
        if unknown := set(samples) - set(MODALITIES):
            raise ValueError(f"unknown modalities {sorted(unknown)}; ImageBind has {', '.join(MODALITIES)}")
        found = {name: self.embed(name, samples[name]) for name in MODALITIES if name in samples}
        others = [name for name in found if name != "image"]
        if "image" in found and others:
            losses = [contrastive_loss(found["image"], found[name], self.scale(name)) for name in others]
            found["loss"] = torch.stack(losses).mean()
        return found


def make_batch(config: ImageBindConfig, draw: Draw) -> dict[str, Tensor]:
    """Draws samples of all six modalities."""
    text = draw.text(config.vocabulary - 1)
    text[:, -1] = config.vocabulary - 1
    return {
        "image": draw.image(),
        "text": text,
        "audio": draw.audio(),
        "depth": draw.depth(),
        "thermal": draw.thermal(),
        "imu": draw.imu(),
    }


def _encoder(config: ImageBindConfig, modality: str) -> nn.Module:
    if modality == "text":
        return TokenTower(config.vocabulary, config.inputs.text_tokens, config.text, config.out_width)
    return PatchTower(
        config.patches(modality),
        getattr(config, modality),
        config.out_width,
        first_norm=modality == "image",
        head_dropout=config.imu_dropout if modality == "imu" else 0.0,
    )


MODEL = ZooModel(
    name="imagebind",
    make=ImageBind,
    sample=make_batch,
    sizes=SIZES,
    source="Girdhar et al. 2023",
    workload="mosaic",
    frozen=FROZEN,
    encoders=ENCODERS,
)
