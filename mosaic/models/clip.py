"""CLIP: a vision and a text transformer into one space (Radford et al. 2021).

``public`` is ViT-L/14: 427.6 M parameters (open_clip's profile of ``ViT-L-14``). CLIP is not in the paper's Table 1;
``paper`` is the same model on Table 2's inputs: 512 is no multiple of 14, so its patches are 16 wide, and it learns
positions for 2,048 tokens of text instead of 77.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.block import Shape
from mosaic.models.layers.targets import contrastive_loss
from mosaic.models.layers.towers import Patches, PatchTower, TokenTower
from mosaic.models.zoo_model import ZooModel

VOCABULARY = 49_408
"""Of CLIP's byte pairs; the last one ends a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Dimensions of a CLIP."""

    vision: Shape
    """Vision transformer."""
    text: Shape
    """Text transformer; attention looks back only."""
    patch: int
    """Height and width of a patch."""
    out_width: int
    """Width of the common space."""
    inputs: InputSizes
    """Sizes of an image and of a text."""
    vocabulary: int = VOCABULARY
    """Ids of the text."""

    @property
    def patches(self) -> Patches:
        """How an image is cut."""
        return Patches(channels=3, extent=(self.inputs.image_px,) * 2, patch=(self.patch,) * 2)


_LARGE = ClipConfig(
    vision=Shape(layers=24, width=1024, heads=16),
    text=Shape(layers=12, width=768, heads=12),
    patch=14,
    out_width=768,
    inputs=InputSizes(image_px=224, text_tokens=77),
)
SIZES: Mapping[str, ClipConfig] = MappingProxyType(
    {
        "tiny": replace(
            _LARGE,
            vision=_LARGE.vision.tiny(),
            text=_LARGE.text.tiny(),
            patch=16,
            out_width=16,
            inputs=TINY,
            vocabulary=64,
        ),
        "public": _LARGE,
        "paper": replace(_LARGE, patch=16, inputs=TABLE_2),
    }
)


class Clip(nn.Module):
    """Two towers and a learned temperature.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.visual = PatchTower(config.patches, config.vision, config.out_width, first_norm=True)
        self.text = TokenTower(config.vocabulary, config.inputs.text_tokens, config.text, config.out_width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> dict[str, Tensor]:
        """Embeds what is there.

        Args:
            image: (batch, 3, height, width).
            text: Ids, (batch, tokens).

        Returns:
            ``image`` and ``text``, (batch, out width), rows of length one; with both, ``loss`` as well.
        """
        found = {}
        if image is not None:
            found["image"] = F.normalize(self.visual(image), dim=-1)
        if text is not None:
            found["text"] = F.normalize(self.text(text), dim=-1)
        if len(found) == 2:
            found["loss"] = contrastive_loss(found["image"], found["text"], self.log_scale.exp())
        return found


def make_batch(config: ClipConfig, draw: Draw) -> dict[str, Tensor]:
    """Draws images and texts; each text ends with the id that is the greatest."""
    text = draw.text(config.vocabulary - 1)
    text[:, -1] = config.vocabulary - 1
    return {"image": draw.image(), "text": text}


MODEL = ZooModel(
    name="clip",
    make=Clip,
    sample=make_batch,
    sizes=SIZES,
    source="Radford et al. 2021",
    encoders=("visual", "text"),
    workload="mosaic",
)
