"""QWen-VAL: vision and audio before one language model, for three tasks (Spindle, appendix C).

The structure of Qwen-VL and Qwen-Audio joined, as Spindle has it; it gives "up to 9.25 billion parameters" and no
dimensions. ``public`` is made of the published parts: Qwen-VL's ViT-bigG of 48 x 1664 with an adapter of 256 tokens
(published as 1.9 B and 0.08 B), Whisper-large-v2's encoder of 32 x 1280 (0.64 B), Qwen-7B (7.7 B). Counted here: 10.3
B; what Spindle left out to have 9.25 B is not told. ``paper`` is the same on Mosaic's Table 2 inputs, with patches 16
wide, since 512 is no multiple of 14.

A batch has rows of three kinds: vision-language, audio-language, and all three. Rows of one kind have placeholders for
what they see or hear, so each encoder and the language model run once a step, over the rows of all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.block import Shape
from mosaic.models.layers.language_model import LanguageConfig, LanguageModel, language_shape, merge
from mosaic.models.layers.resampler import Resampler
from mosaic.models.layers.targets import next_token_loss
from mosaic.models.layers.towers import Patches, PatchTower, embedding
from mosaic.models.layers.whisper import WhisperEncoder
from mosaic.models.zoo_model import ZooModel

TASKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"vision-language": ("image",), "audio-language": ("audio",), "vision-audio-language": ("image", "audio")}
)
"""What the rows of each task have beside text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenValConfig:
    """Dimensions of a QWen-VAL."""

    vision: Shape
    """Vision transformer."""
    adapter: Shape
    """Of the resampler behind it."""
    patch: int
    """Height and width of a patch."""
    image_tokens: int
    """Tokens that are left of an image."""
    audio: Shape
    """Of the speech encoder."""
    language: LanguageConfig
    """Language model."""
    inputs: InputSizes
    """Sizes of samples; a text's tokens include those of image and audio."""
    image_id: int
    """Id of the placeholders of an image."""
    audio_id: int
    """Id of the placeholders of audio."""


_PUBLISHED = QwenValConfig(
    vision=Shape(layers=48, width=1664, heads=16, mlp=8192),
    adapter=Shape(layers=1, width=4096, heads=32),
    patch=14,
    image_tokens=256,
    audio=Shape(layers=32, width=1280, heads=20),
    language=LanguageConfig(
        shape=language_shape(layers=32, width=4096, heads=32, mlp=11_008, qkv_bias=True), vocabulary=151_936
    ),
    inputs=InputSizes(image_px=448, audio_mels=80, audio_frames=3000),
    image_id=151_859,
    audio_id=151_860,
)
SIZES: Mapping[str, QwenValConfig] = MappingProxyType(
    {
        "tiny": replace(
            _PUBLISHED,
            vision=_PUBLISHED.vision.tiny(),
            adapter=_PUBLISHED.adapter.tiny(1),
            patch=16,
            image_tokens=3,
            audio=_PUBLISHED.audio.tiny(),
            language=_PUBLISHED.language.tiny(),
            inputs=replace(TINY, text_tokens=16, audio_frames=16),
            image_id=62,
            audio_id=63,
        ),
        "public": _PUBLISHED,
        "paper": replace(_PUBLISHED, patch=16, inputs=replace(TABLE_2, audio_mels=80)),
    }
)


class Seeing(nn.Module):
    """Qwen-VL's vision: a transformer over patches, of which a resampler leaves a few tokens."""

    def __init__(self, config: QwenValConfig) -> None:
        super().__init__()
        patches = Patches(channels=3, extent=(config.inputs.image_px,) * 2, patch=(config.patch,) * 2)
        self.tower = PatchTower(patches, config.vision, None, pooled=False, first_norm=True)
        width = config.language.shape.width
        self.resampler = Resampler(config.image_tokens, config.adapter, config.vision.width, width, perceptron=False)

    def forward(self, image: Tensor) -> Tensor:
        """Takes images; returns (batch, image tokens, width of the language model)."""
        found: Tensor = self.resampler(self.tower(image))
        return found


class QwenVal(nn.Module):
    """Two encoders, embedding, language model, head.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: QwenValConfig) -> None:
        super().__init__()
        self.config = config
        width = config.language.shape.width
        self.visual = Seeing(config)
        self.audio = WhisperEncoder(config.inputs.audio_mels, config.inputs.audio_frames, config.audio, width)
        self.embed_tokens = embedding(config.language.vocabulary, width)
        self.language_model = LanguageModel(config.language)
        self.lm_head = nn.Linear(width, config.language.vocabulary, bias=False)

    def forward(
        self, input_ids: Tensor, labels: Tensor, image: Tensor | None = None, audio: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Merges what is seen and heard into the text and predicts the next tokens.

        Args:
            input_ids: (batch, tokens), with placeholders in the rows that see or hear something.
            labels: Ids to predict, (batch, tokens); -100 where there is nothing to predict.
            image: (rows with an image, 3, height, width), in the order of the rows.
            audio: (rows with audio, 1, mel bands, frames), in the order of the rows.

        Returns:
            ``logits`` (batch, tokens, vocabulary) and ``loss``.
        """
        embedded = self.embed_tokens(input_ids)
        if image is not None:
            embedded = merge(embedded, input_ids == self.config.image_id, self.visual(image))
        if audio is not None:
            embedded = merge(embedded, input_ids == self.config.audio_id, self.audio(audio))
        logits = self.lm_head(self.language_model(embedded))
        return {"logits": logits, "loss": next_token_loss(logits, labels)}


def make_batch(config: QwenValConfig, draw: Draw, tasks: Sequence[str] = tuple(TASKS)) -> dict[str, Tensor]:
    """Draws a batch of each task, one after the other; only text is to be predicted.

    Raises:
        ValueError: A task is unknown, or the placeholders do not fit into the text.
    """
    counts = {"image": config.image_tokens, "audio": config.inputs.audio_frames // 4}
    place = {"image": config.image_id, "audio": config.audio_id}
    rows: list[Tensor] = []
    samples: dict[str, list[Tensor]] = {"image": [], "audio": []}
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; QWen-VAL has {', '.join(TASKS)}")
        ids, start = draw.text(min(place.values())), 1
        for modality in TASKS[task]:
            if start + counts[modality] >= ids.shape[1]:
                raise ValueError(f"{modality} does not fit into text_tokens={ids.shape[1]}; use a longer text")
            ids[:, start : start + counts[modality]] = place[modality]
            start += counts[modality]
            samples[modality].append(draw.image() if modality == "image" else draw.audio())
        rows.append(ids)
    ids = torch.cat(rows)
    labels = ids.masked_fill((ids == config.image_id) | (ids == config.audio_id), -100)
    return {"input_ids": ids, "labels": labels} | {name: torch.cat(made) for name, made in samples.items() if made}


MODEL = ZooModel(
    name="qwen-val",
    make=QwenVal,
    sample=make_batch,
    sizes=SIZES,
    source="Spindle, appendix C",
    workload="spindle",
    encoders=("visual", "audio"),
    backbone=("language_model",),
    tasks=tuple(TASKS),
)
