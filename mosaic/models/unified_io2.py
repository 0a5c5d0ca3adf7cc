"""Unified-IO 2: text, images, audio and their histories into one encoder-decoder that writes text, images and audio.

After Lu et al. 2024. ``public`` is XXL, published as 6.8 B; ``LARGE`` and ``XL`` are published as 1.1 B and 3.2 B.
Counted here: 1.12, 3.21 and 6.90 B, with four vision transformers of their own, without the frozen tokenizers that
turn images and audio into codes beforehand. The paper's Table 1 calls its Unified-IO 2 3.8 B, and its dimensions, 48 x
3072, are XXL's (24 layers of encoder, 24 of decoder); vision and audio of 11 x 768 are right, and its text encoder of
1 x 3072 is the embedding. So ``paper`` has XXL's dimensions on Table 2's inputs: 2,048 tokens of text instead of 512,
images of 512 x 512 instead of 384 x 384, 8 s of audio instead of 4.08 s.

Language model over the encoders of images and audio, ``public`` does 61 times the operations, ``paper`` 105 times, and
Table 1 6.6 times: its 16.70 TFLOPs are those of 512 tokens, fewer than one image has. ``table1`` has its layers and
widths, Table 2's image and audio, and its ratio (6.7): 16 neighbouring tokens of what is seen and heard are made one
before the language model, which the original does not do; histories leave a quarter of their tokens, texts have 160.

The vision transformers are those of CLIP ViT-B/16 and AST up to the layer before the last, frozen in the original:
``freeze=FROZEN``. A batch's targets stand in one sequence for the decoder, and none sees another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.attention import Angles, Rotary, grid_positions, line_positions
from mosaic.models.layers.block import Shape, Stack
from mosaic.models.layers.language_model import language_shape
from mosaic.models.layers.resampler import Resampler
from mosaic.models.layers.targets import shifted, target_mask, token_loss
from mosaic.models.layers.towers import Patches, PatchTower, embedding, merge_neighbours
from mosaic.models.zoo_model import ZooModel

TARGETS = ("text", "image", "audio")
"""What the decoder writes, in its order."""
FROZEN = (
    "encoders.image.tower",
    "encoders.audio.tower",
    "encoders.image_history.tower",
    "encoders.audio_history.tower",
)
"""What the original's training leaves as CLIP and AST made it (``freeze_vit``)."""

MODULES = (
    *("encoders.image", "encoders.audio", "encoders.image_history", "encoders.audio_history"),
    *("encoder", "decoder"),
)
"""Modules to place: an encoder of XXL holds less than 2 % of the parameters, and is work all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedIO2Config:
    """Dimensions of a Unified-IO 2."""

    language: Shape
    """Of the encoder's blocks, and of the decoder's, which are as many."""
    vision: Shape
    """Of all four vision transformers."""
    resampler: Shape
    """Of the histories' resamplers."""
    inputs: InputSizes
    """Sizes of samples."""
    vocabularies: tuple[int, int, int] = (33_280, 16_512, 8_320)
    """Ids of text, of an image's codes and of an audio's codes."""
    image_codes: int = 1024
    """Codes of an image that is written, a square number."""
    audio_codes: int = 512
    """Codes of an audio clip that is written."""
    history_images: int = 4
    """Earlier images of a sample."""
    history_px: int = 256
    """Their height and width."""
    history_clips: int = 4
    """Earlier audio clips of a sample."""
    history_frames: int = 256
    """Frames of a spectrum of each."""
    image_latents: int = 32
    """Tokens that are left of each earlier image."""
    audio_latents: int = 16
    """Tokens that are left of each earlier clip."""
    merged: int = 1
    """Neighbouring tokens of an image or of audio whose mean is one of the encoder's; Table 1's alone."""

    def patches(self, name: str) -> Patches:
        """How samples of an encoder are cut."""
        if name.startswith("image"):
            side = self.inputs.image_px if name == "image" else self.history_px
            return Patches(channels=3, extent=(side, side), patch=(16, 16))
        frames = self.inputs.audio_frames if name == "audio" else self.history_frames
        return Patches(channels=1, extent=(self.inputs.audio_mels, frames), patch=(16, 16))


def _published(width: int, heads: int, head_width: int, mlp: int, resampled: int) -> UnifiedIO2Config:
    return UnifiedIO2Config(
        language=language_shape(layers=24, width=width, heads=heads, head_width=head_width, mlp=mlp, qk_norm=True),
        vision=Shape(layers=11, width=768, heads=12),
        resampler=Shape(layers=2, width=resampled, heads=resampled // 64),
        inputs=InputSizes(text_tokens=512, image_px=384, audio_frames=256),
    )


LARGE = _published(1024, 16, 64, 2816, 768)
XL = _published(2048, 16, 128, 5120, 1024)
XXL = _published(3072, 24, 128, 8192, 1024)
SIZES: Mapping[str, UnifiedIO2Config] = MappingProxyType(
    {
        "tiny": replace(
            XXL,
            language=XXL.language.tiny(),
            vision=XXL.vision.tiny(),
            resampler=XXL.resampler.tiny(1),
            inputs=TINY,
            vocabularies=(64, 32, 16),
            image_codes=4,
            audio_codes=6,
            history_images=2,
            history_px=32,
            history_clips=2,
            history_frames=16,
            image_latents=2,
            audio_latents=2,
        ),
        "public": XXL,
        "paper": replace(XXL, inputs=TABLE_2),
        "table1": replace(
            XXL,
            inputs=replace(TABLE_2, text_tokens=160),
            image_codes=64,
            audio_codes=32,
            image_latents=8,
            audio_latents=4,
            merged=16,
        ),
    }
)


class Seen(nn.Module):
    """A vision transformer over an image or a spectrum, projected for the encoder, and ``merged`` tokens made one."""

    def __init__(self, patches: Patches, vision: Shape, out_width: int, merged: int) -> None:
        super().__init__()
        self.merged = merged
        self.tower = PatchTower(patches, vision, None, pooled=False, first_norm=True)
        self.project = nn.Linear(vision.width, out_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes a batch of samples; returns (batch, tokens / merged, out width)."""
        found: Tensor = self.project(merge_neighbours(self.tower(x), self.merged))
        return found


class History(nn.Module):
    """A vision transformer over several earlier samples, and a resampler that leaves a few tokens of each."""

    def __init__(self, patches: Patches, vision: Shape, resampler: Shape, latents: int, out_width: int) -> None:
        super().__init__()
        self.tower = PatchTower(patches, vision, None, pooled=False, first_norm=True)
        self.resampler = Resampler(latents, resampler, vision.width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes (batch, samples, ...); returns (batch, samples * latents, out width)."""
        found: Tensor = self.resampler(self.tower(x.flatten(0, 1))).unflatten(0, x.shape[:2]).flatten(1, 2)
        return found


class UnifiedIO2(nn.Module):
    """Embeddings, four encoders of what is seen and heard, an encoder, a decoder; logits share the embeddings' weights.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: UnifiedIO2Config) -> None:
        super().__init__()
        self.config = config
        width = config.language.width
        self.embeddings = nn.ModuleDict(
            {name: embedding(size, width) for name, size in zip(TARGETS, config.vocabularies, strict=True)}
        )
        latents = {"image": config.image_latents, "audio": config.audio_latents}
        self.encoders = nn.ModuleDict(
            {name: Seen(config.patches(name), config.vision, width, config.merged) for name in latents}
            | {
                f"{name}_history": History(
                    config.patches(f"{name}_history"), config.vision, config.resampler, count, width
                )
                for name, count in latents.items()
            }
        )
        head_width = config.language.head_width or width // config.language.heads
        self.line, self.grid = Rotary(head_width), Rotary(head_width, layout="grid")
        self.encoder = Stack(config.language)
        self.decoder = Stack(config.language, context_width=width)

    def forward(self, input_ids: Tensor, **samples: Tensor) -> dict[str, Tensor]:
        """Reads what is there and predicts the targets that there are.

        Args:
            input_ids: Ids of the text, (batch, tokens).
            samples: ``image`` (batch, 3, height, width), ``audio`` (batch, 1, mel bands, frames), ``image_history`` and
                ``audio_history`` (batch, samples, ...) of the same kinds; ``text_targets``, ``image_targets`` and
                ``audio_targets``, ids (batch, tokens). Any may be missing; one target is needed.

        Returns:
            ``text_logits``, ``image_logits`` and ``audio_logits``, (batch, tokens, vocabulary), of the targets that
            there are, and ``loss``: their mean.

        Raises:
            ValueError: There is no target, or a name is unknown.
        """
        known = [*self.encoders, *(f"{name}_targets" for name in TARGETS)]
        targets = {name: samples[f"{name}_targets"] for name in TARGETS if f"{name}_targets" in samples}
        if not targets or set(samples) - set(known):
            raise ValueError(f"got {', '.join(samples) or 'no samples'}; one target is needed, of {', '.join(known)}")
        inputs, read = self._embed(input_ids, targets)
        tokens, angles = [inputs], [self._line(inputs.shape[1])]
        for name, encoder in self.encoders.items():
            if name in samples:
                tokens.append(encoder(samples[name]))
                is_line = "history" in name or self.config.merged > 1
                grid = None if is_line else self.config.patches(name).grid
                angles.append(self._line(tokens[-1].shape[1]) if grid is None else self._grid(*grid))
        context = self.encoder(torch.cat(tokens, dim=1), angles=_joined(angles))
        return self._write(context, read, targets)

    def _embed(self, input_ids: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeds the input text and what the decoder reads, each vocabulary in one call."""
        read = {name: shifted(ids) for name, ids in targets.items()}
        count = input_ids.shape[1]
        text = self.embeddings["text"](torch.cat((input_ids, read["text"]), dim=1) if "text" in read else input_ids)
        embedded = {
            name: text[:, count:] if name == "text" else self.embeddings[name](ids) for name, ids in read.items()
        }
        return text[:, :count], embedded

    def _write(self, context: Tensor, read: dict[str, Tensor], targets: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths = [part.shape[1] for part in read.values()]
        side = round(self.config.image_codes**0.5)
        angles = [
            self._grid(side, side) if name == "image" else self._line(part.shape[1]) for name, part in read.items()
        ]
        mask = target_mask(lengths, context.device)
        hidden = self.decoder(torch.cat(list(read.values()), dim=1), context, angles=_joined(angles), mask=mask)
        found = {}
        for name, part in zip(read, hidden.split(lengths, dim=1), strict=True):
            found[f"{name}_logits"] = F.linear(part, cast(nn.Embedding, self.embeddings[name]).weight)
        losses = [token_loss(found[f"{name}_logits"], ids) for name, ids in targets.items()]
        return found | {"loss": torch.stack(losses).mean()}

    def _line(self, tokens: int) -> Angles:
        angles: Angles = self.line(line_positions(tokens, self.line.inverse.device))
        return angles

    def _grid(self, rows: int, columns: int) -> Angles:
        angles: Angles = self.grid(grid_positions(rows, columns, self.grid.inverse.device))
        return angles


def make_batch(config: UnifiedIO2Config, draw: Draw) -> dict[str, Tensor]:
    """Draws all five inputs and all three targets; a text that is written is as long as one that is read."""
    sizes = config.inputs
    text, image, audio = config.vocabularies
    side = config.history_px
    return {
        "input_ids": draw.text(text),
        "image": draw.image(),
        "audio": draw.audio(),
        "image_history": draw.normal(config.history_images, 3, side, side),
        "audio_history": draw.normal(config.history_clips, 1, sizes.audio_mels, config.history_frames),
        "text_targets": draw.text(text),
        "image_targets": draw.ids(config.image_codes, image),
        "audio_targets": draw.ids(config.audio_codes, audio),
    }


def _joined(angles: list[Angles]) -> Angles:
    return torch.cat([cosines for cosines, _ in angles]), torch.cat([sines for _, sines in angles])


MODEL = ZooModel(
    name="unified-io-2",
    make=UnifiedIO2,
    sample=make_batch,
    sizes=SIZES,
    source="Lu et al. 2024",
    workload="mosaic",
    frozen=FROZEN,
    encoders=MODULES[:4],
    backbone=MODULES[4:],
    modules=MODULES,
)
