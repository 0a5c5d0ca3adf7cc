"""OFASys: nine modalities through adaptors into one encoder-decoder that writes six (Bai et al. 2022).

``public`` is the architecture ``huge``: 24 layers of encoder and 12 of decoder, 1280 wide, a ResNet-152 without its
last stage before images, and one embedding for the five modalities that are words; with text and images alone it is
OFA-huge, published as 930 M (Wang et al. 2022). Counted here: 914 M, and 965 M with the adaptors of the other
modalities. Relative position biases are left out in favour of absolute positions, which every attention kernel takes.

The paper's Table 1 calls its OFASys 6.3 B with a language model of 36 x 1280: these 36 layers are ``huge``'s, a model
of 0.9 B; 6.3 B would fit the architecture ``6b``, 2560 wide. It lists encoders of 8 x 1280 for vision, 4 x 1280 for
text and 6 x 1280 for audio, which the original does not have. ``paper`` has them, patches in the place of the residual
network, and two layers for each of the six others, which is our choice: 1.57 B in all. Its six decoders are not named
in the paper; ours write text, image codes, boxes, categories, audio and motion. OFASys has motion where the paper
speaks of IMU and of actions: its sequence is as long as Table 2's actions.

Language model over the encoders of vision, text and audio, ``paper`` does 12.7 times the operations, Table 1 1.6 times,
and the encoders' own operations agree within 3 % in sum. Its 4.80 TFLOPs are those of 1,130 tokens, where the three
encoders alone make 3,272. ``table1`` has its layers, widths, ratio (1.6) and Table 2's inputs: eight neighbouring
tokens of an adaptor are made one before the language model, which the original does not do, and it writes texts of 512
tokens and images of 256 codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.inputs import TABLE_2, TINY, Draw, InputSizes
from mosaic.models.layers.adaptors import Adaptor, PatchStem, ResNetStem, SpectrumStem, motion_stem
from mosaic.models.layers.block import Shape, Stack
from mosaic.models.layers.resnet import STRIDE, ResNet
from mosaic.models.layers.targets import shifted, target_mask, token_loss
from mosaic.models.layers.towers import Patches, embedding
from mosaic.models.zoo_model import ZooModel

WORDS = ("text", "box", "phone", "struct", "category")
"""Modalities that are ids of the shared vocabulary, boxes after rounding."""
MODALITIES = ("text", "image", "audio", "video", "motion", "box", "phone", "struct", "category")
ENCODERS = tuple(
    f"adaptors.{name}" for name in ("image", "text", "audio", "video", "motion", "box", "phone", "struct", "category")
)
"""Their paths, those of Table 1 first."""
BACKBONE = ("encoder", "decoder")
"""The language model."""
WRITTEN_WORDS = ("text", "image", "box", "category")
"""Targets that are ids of the shared vocabulary."""
WRITTEN_NUMBERS = ("audio", "motion")
"""Targets that are numbers a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfasysConfig:
    """Dimensions of an OFASys."""

    encoder: Shape
    """Of the shared encoder's blocks."""
    decoder: Shape
    """Of the shared decoder's."""
    inputs: InputSizes
    """Sizes of samples; the sequence of a motion is as long as one of actions."""
    own_layers: tuple[tuple[str, int], ...] = ()
    """Modalities whose adaptors have blocks of their own, and how many layers."""
    residual: tuple[int, ...] | None = (3, 8, 36)
    """Blocks of the residual network's stages; None for patches."""
    residual_width: int = 64
    """Channels of its first stage."""
    patch: tuple[int, int, int] = (2, 64, 64)
    """Frames, height and width of a video's patch where there is no residual network."""
    image_patch: int = 16
    """Height and width of an image's patch there."""
    words: int = 50_265
    """Ids of words; after them come an image's codes, then the bins of boxes."""
    codes: int = 8_192
    """Ids of an image's codes."""
    bins: int = 1_000
    """Ids of a coordinate of a box."""
    image_codes: int = 1_024
    """Codes of an image that is written."""
    motion_features: int = 144
    """Numbers of a motion's step: 24 joints with a rotation of six numbers; ours."""
    phone_tokens: int = 256
    """Phones of a sample; ours."""
    struct_tokens: int = 512
    """Tokens of a table or a database; ours."""
    category_tokens: int = 16
    """Tokens of a category; ours."""
    merged: int = 1
    """Neighbouring tokens of an adaptor whose mean is one of the encoder's; Table 1's alone."""
    written_tokens: int | None = None
    """Tokens of a text that is written; as many as of one that is read by default."""

    @property
    def vocabulary(self) -> int:
        """All ids."""
        return self.words + self.codes + self.bins

    def num_tokens(self, modality: str) -> int:
        """Returns the tokens of a sample of a modality."""
        sizes = self.inputs
        if modality in ("image", "video") and self.residual is None:
            return self.patches(modality).num_tokens
        return {
            "text": sizes.text_tokens,
            "image": (sizes.image_px // STRIDE) ** 2,
            "audio": sizes.audio_frames // 4,
            "video": sizes.video_frames,
            "motion": sizes.action_tokens,
            "box": 4 * sizes.boxes,
            "phone": self.phone_tokens,
            "struct": self.struct_tokens,
            "category": self.category_tokens,
        }[modality]

    def patches(self, modality: str) -> Patches:
        """How images and videos are cut where there is no residual network."""
        sizes = self.inputs
        if modality == "image":
            return Patches(channels=3, extent=(sizes.image_px,) * 2, patch=(self.image_patch,) * 2)
        return Patches(channels=3, extent=(sizes.video_frames, sizes.video_px, sizes.video_px), patch=self.patch)


HUGE = OfasysConfig(
    encoder=Shape(layers=24, width=1280, heads=16, inner_norms=True),
    decoder=Shape(layers=12, width=1280, heads=16, inner_norms=True),
    inputs=InputSizes(image_px=480, video_px=480, video_frames=8, audio_mels=80, text_tokens=512),
)
_OWN_LAYERS = (
    *(("image", 8), ("text", 4), ("audio", 6)),
    *((name, 2) for name in ("video", "motion", "box", "phone", "struct", "category")),
)
_PAPER = replace(HUGE, inputs=TABLE_2, own_layers=_OWN_LAYERS, residual=None)
SIZES: Mapping[str, OfasysConfig] = MappingProxyType(
    {
        "tiny": replace(
            HUGE,
            encoder=HUGE.encoder.tiny(),
            decoder=HUGE.decoder.tiny(),
            inputs=TINY,
            own_layers=tuple((name, 1) for name in MODALITIES),
            residual=None,
            patch=(2, 16, 16),
            words=64,
            codes=16,
            bins=20,
            image_codes=4,
            motion_features=6,
            phone_tokens=6,
            struct_tokens=8,
            category_tokens=2,
        ),
        "public": HUGE,
        "paper": _PAPER,
        "table1": replace(_PAPER, merged=8, written_tokens=512, image_codes=256),
    }
)


class Ofasys(nn.Module):
    """An embedding, nine adaptors, a shared encoder and decoder, and heads; words share the embedding's weights.

    Args:
        config: Its dimensions.
    """

    def __init__(self, config: OfasysConfig) -> None:
        super().__init__()
        self.config = config
        width = config.encoder.width
        self.embed_tokens = embedding(config.vocabulary, width)
        residual = None if config.residual is None else ResNet(config.residual, config.residual_width)
        self.adaptors = nn.ModuleDict(
            {
                name: Adaptor(
                    _stem(config, name, residual),
                    config.num_tokens(name),
                    replace(config.encoder, layers=dict(config.own_layers).get(name, 0)),
                    config.merged,
                )
                for name in MODALITIES
            }
        )
        self.encoder = Stack(config.encoder)
        longest = max(config.num_tokens(name) for name in (*WRITTEN_WORDS, *WRITTEN_NUMBERS))
        self.positions = nn.Parameter(0.02 * torch.randn(max(longest, config.image_codes), width))
        self.decoder = Stack(config.decoder, context_width=width)
        features = {"audio": 4 * config.inputs.audio_mels, "motion": config.motion_features}
        self.readers = nn.ModuleDict({name: nn.Linear(count, width) for name, count in features.items()})
        self.writers = nn.ModuleDict({name: nn.Linear(width, count) for name, count in features.items()})

    def forward(self, **samples: Tensor) -> dict[str, Tensor]:
        """Reads the modalities that are there and predicts the targets that are there.

        Args:
            samples: By modality: ``text``, ``phone``, ``struct``, ``category``, ids (batch, tokens); ``image`` (batch,
                3, height, width); ``video`` (batch, 3, frames, height, width); ``audio`` (batch, 1, mel bands,
                frames); ``motion`` (batch, steps, features); ``box`` (batch, boxes, 4) in the unit square. By target:
                ``text_targets``, ``image_targets``, ``category_targets``, ids; ``box_targets``, ``audio_targets`` and
                ``motion_targets`` as the modalities. One modality and one target are needed.

        Returns:
            ``text_found`` and so on: logits (batch, tokens, vocabulary), or numbers, of each target; and ``loss``, the
            mean of cross-entropies and of mean absolute errors.

        Raises:
            ValueError: There is no modality or no target, or a name is unknown.
        """
        found = {name: samples[name] for name in MODALITIES if name in samples}
        written = (*WRITTEN_WORDS, *WRITTEN_NUMBERS)
        targets = {name: samples[f"{name}_targets"] for name in written if f"{name}_targets" in samples}
        if not found or not targets or len(found) + len(targets) < len(samples):
            known = [*MODALITIES, *(f"{name}_targets" for name in written)]
            raise ValueError(
                f"got {', '.join(samples) or 'no samples'}; a modality and a target are needed, of {', '.join(known)}"
            )
        goals = {name: self._goal(name, target) for name, target in targets.items()}
        embedded, read = self._embed(found, goals)
        context = self.encoder(torch.cat([self.adaptors[name](part) for name, part in embedded.items()], dim=1))
        return self._write(context, read, goals)

    def _goal(self, name: str, target: Tensor) -> Tensor:
        """Returns a target as ids, or as numbers a step of the decoder: four frames of audio at once."""
        if name == "box":
            return self._bins(target)
        if name == "audio":
            four: Tensor = target.squeeze(1).transpose(1, 2).unflatten(1, (-1, 4)).flatten(2)
            return four
        return target + self.config.words if name == "image" else target

    def _bins(self, boxes: Tensor) -> Tensor:
        """Returns the ids of boxes' coordinates, (batch, 4 * boxes)."""
        bins = (boxes.clamp(0, 1) * (self.config.bins - 1)).round().long()
        return bins.flatten(1) + self.config.words + self.config.codes

    def _embed(self, found: dict[str, Tensor], goals: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Embeds all words, those that are read and those that were written before, in one call."""
        ids = {name: self._bins(part) if name == "box" else part for name, part in found.items() if name in WORDS}
        before = {f"{name}_targets": shifted(goal) for name, goal in goals.items() if name in WRITTEN_WORDS}
        words = ids | before
        parts: dict[str, Tensor] = {}
        if words:
            lengths = [part.shape[1] for part in words.values()]
            embedded = self.embed_tokens(torch.cat(list(words.values()), dim=1))
            parts = dict(zip(words, embedded.split(lengths, dim=1), strict=True))
        read = {
            name: parts[f"{name}_targets"] if name in WRITTEN_WORDS else self.readers[name](shifted(goal))
            for name, goal in goals.items()
        }
        return {name: parts.get(name, part) for name, part in found.items()}, read

    def _write(self, context: Tensor, read: dict[str, Tensor], goals: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths = [part.shape[1] for part in read.values()]
        tokens = torch.cat([part + self.positions[: part.shape[1]] for part in read.values()], dim=1)
        hidden = self.decoder(tokens, context, mask=target_mask(lengths, context.device))
        found, losses = {}, []
        for name, part in zip(read, hidden.split(lengths, dim=1), strict=True):
            if name in WRITTEN_WORDS:
                found[f"{name}_found"] = F.linear(part, self.embed_tokens.weight)
                losses.append(token_loss(found[f"{name}_found"], goals[name]))
            else:
                found[f"{name}_found"] = self.writers[name](part)
                losses.append(F.l1_loss(found[f"{name}_found"].float(), goals[name].float()))
        return found | {"loss": torch.stack(losses).mean()}


def make_batch(config: OfasysConfig, draw: Draw) -> dict[str, Tensor]:
    """Draws all nine modalities and all six targets."""
    motion = (config.inputs.action_tokens, config.motion_features)
    return {
        "text": draw.text(config.words),
        "image": draw.image(),
        "audio": draw.audio(),
        "video": draw.video(),
        "motion": draw.normal(*motion),
        "box": draw.boxes(),
        "phone": draw.ids(config.phone_tokens, config.words),
        "struct": draw.ids(config.struct_tokens, config.words),
        "category": draw.ids(config.category_tokens, config.words),
        "text_targets": draw.ids(config.written_tokens or config.inputs.text_tokens, config.words),
        "image_targets": draw.ids(config.image_codes, config.codes),
        "box_targets": draw.boxes(),
        "category_targets": draw.ids(config.category_tokens, config.words),
        "audio_targets": draw.audio(),
        "motion_targets": draw.normal(*motion),
    }


def _stem(config: OfasysConfig, modality: str, residual: ResNet | None) -> nn.Module:
    width = config.encoder.width
    if modality in WORDS:
        return nn.Identity()
    if modality == "audio":
        return SpectrumStem(config.inputs.audio_mels, width)
    if modality == "motion":
        return motion_stem(config.motion_features, width)
    if residual is not None:
        return ResNetStem(residual, config.residual_width, width)
    return PatchStem(config.patches(modality), width)


MODEL = ZooModel(
    name="ofasys",
    make=Ofasys,
    sample=make_batch,
    sizes=SIZES,
    source="Bai et al. 2022",
    workload="mosaic",
    encoders=ENCODERS,
    backbone=BACKBONE,
)
