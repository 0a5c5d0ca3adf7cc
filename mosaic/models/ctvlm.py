"""CTVLM: a tiny and a large vision-language model that learn from each other (Lu et al., ACM MM 2024).

**A stand-in.** Public is the abstract: the two are connected by a projection, the tiny one aligns with the large one,
and they distil into each other; dimensions are published nowhere, and the paper's Table 1 leaves CTVLM out. ``public``
is made of published models of fitting sizes after LLaVA's pattern: ViT-B/16 and TinyLlama (1.100 B) for the tiny one,
ViT-L/14 and LLaMA-2 7B (6.738 B) for the large one, a perceptron from vision to language each. ``paper`` is the same
on Table 2's inputs, with patches 16 wide in both, since 512 is no multiple of 14.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.block import Shape
from mosaic.models.layers.language_model import LLAMA_2_7B, TINY_LLAMA, LanguageConfig, LanguageModel
from mosaic.models.layers.targets import next_token_loss
from mosaic.models.layers.towers import Patches, PatchTower, embedding
from mosaic.models.zoo_model import ZooModel

MODULES = tuple(f"{branch}.{part}" for branch in ("small", "large") for part in ("visual", "language_model"))
"""Modules to place, where the two models as wholes are too coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLanguageConfig:
    """Dimensions of one of the two models."""

    vision: Shape
    """Vision transformer."""
    patch: int
    """Height and width of its patches."""
    language: LanguageConfig
    """Language model."""

    def tiny(self) -> VisionLanguageConfig:
        """Returns the same kind of model, small."""
        return replace(self, vision=self.vision.tiny(), patch=16, language=self.language.tiny())


@dataclass(frozen=True, slots=True, kw_only=True)
class CtvlmConfig:
    """Dimensions of both."""

    small: VisionLanguageConfig
    """The tiny model."""
    large: VisionLanguageConfig
    """The large model; of the same vocabulary."""
    inputs: InputSizes
    """Sizes of an image and of a text."""
    temperature: float = 2.0
    """Of the distillation."""


_PUBLISHED = CtvlmConfig(
    small=VisionLanguageConfig(vision=Shape(layers=12, width=768, heads=12), patch=16, language=TINY_LLAMA),
    large=VisionLanguageConfig(vision=Shape(layers=24, width=1024, heads=16), patch=14, language=LLAMA_2_7B),
    inputs=InputSizes(image_px=224, text_tokens=512),
)
_LARGE_TINY = _PUBLISHED.large.tiny()
SIZES: Mapping[str, CtvlmConfig] = MappingProxyType(
    {
        "tiny": replace(
            _PUBLISHED,
            small=_PUBLISHED.small.tiny(),
            large=replace(
                _LARGE_TINY, language=replace(_LARGE_TINY.language, shape=_LARGE_TINY.language.shape.tiny(width=48))
            ),
            inputs=TINY,
        ),
        "public": _PUBLISHED,
        "paper": replace(_PUBLISHED, large=replace(_PUBLISHED.large, patch=16), inputs=TABLE_2),
    }
)


class VisionLanguageModel(nn.Module):
    """One vision-language model: the image's tokens stand before the text's.

    Args:
        config: Its dimensions.
        image_px: Height and width of an image.
    """

    def __init__(self, config: VisionLanguageConfig, image_px: int) -> None:
        super().__init__()
        width = config.language.shape.width
        patches = Patches(channels=3, extent=(image_px,) * 2, patch=(config.patch,) * 2)
        self.visual = PatchTower(patches, config.vision, None, pooled=False, first_norm=True)
        self.projector = nn.Sequential(nn.Linear(config.vision.width, width), nn.GELU(), nn.Linear(width, width))
        self.embed_tokens = embedding(config.language.vocabulary, width)
        self.language_model = LanguageModel(config.language)
        self.lm_head = nn.Linear(width, config.language.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, image: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Takes ids (batch, tokens) and images; returns the text's hidden states and logits, (batch, tokens, ...)."""
        tokens = self.embed_tokens(input_ids)
        if image is not None:
            tokens = torch.cat((self.projector(self.visual(image)), tokens), dim=1)
        hidden = self.language_model(tokens)[:, -input_ids.shape[1] :]
        return hidden, self.lm_head(hidden)


class Ctvlm(nn.Module):
    """Both models on the same batch.

    Args:
        config: Their dimensions.

    Raises:
        ValueError: The two have different vocabularies.
    """

    def __init__(self, config: CtvlmConfig) -> None:
        super().__init__()
        vocabularies = (config.small.language.vocabulary, config.large.language.vocabulary)
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(f"vocabularies of {vocabularies} ids cannot be distilled; give both models the same")
        self.temperature = config.temperature
        self.small = VisionLanguageModel(config.small, config.inputs.image_px)
        self.large = VisionLanguageModel(config.large, config.inputs.image_px)
        self.align = nn.Linear(config.small.language.shape.width, config.large.language.shape.width)

    def forward(self, input_ids: Tensor, labels: Tensor, image: Tensor | None = None) -> dict[str, Tensor]:
        """Runs both.

        Args:
            input_ids: (batch, tokens).
            labels: Ids to predict, (batch, tokens); -100 where there is nothing to predict.
            image: (batch, 3, height, width).

        Returns:
            ``small_logits`` and ``large_logits``, (batch, tokens, vocabulary); ``loss``: both cross-entropies, the
            distance of the projected small hidden states from the large ones, and both distillations.
        """
        small_hidden, small = self.small(input_ids, image)
        large_hidden, large = self.large(input_ids, image)
        away = F.mse_loss(self.align(small_hidden).float(), large_hidden.detach().float())
        learned = self._distil(small, large) + self._distil(large, small)
        loss = next_token_loss(small, labels) + next_token_loss(large, labels) + away + learned
        return {"small_logits": small, "large_logits": large, "loss": loss}

    def _distil(self, learner: Tensor, teacher: Tensor) -> Tensor:
        """Returns the divergence of a learner's words from its teacher's, a mean over tokens."""
        words, goal = (part.float().div(self.temperature).log_softmax(-1) for part in (learner, teacher.detach()))
        apart = F.kl_div(words, goal, reduction="none", log_target=True).sum(-1)
        return apart.mean() * self.temperature**2


def make_batch(config: CtvlmConfig, draw: Draw) -> dict[str, Tensor]:
    """Draws images and texts."""
    ids = draw.text(config.small.language.vocabulary)
    return {"input_ids": ids, "labels": ids.clone(), "image": draw.image()}


MODEL = ZooModel(
    name="ctvlm",
    make=Ctvlm,
    sample=make_batch,
    sizes=SIZES,
    source="Lu et al., ACM MM 2024; a stand-in",
    workload="mosaic",
    encoders=("small.visual", "large.visual"),
    backbone=("small.language_model", "large.language_model"),
    modules=MODULES,
)
