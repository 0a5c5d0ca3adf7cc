"""The table of pipelined models, with the papers' distribution over devices.

Tokens. An image is 169 tokens of the backbone in PipeWeaver (section 8). What the ViT computes for them it does not
say. We take 26 x 26 patches, merged 2 x 2 before the backbone, as current models do. That agrees with its evaluation:
by section 5's rule of 95 % a sub-microbatch of VLM-S is then 14 images (Fig. 10 finds 12), the ViT has 0.37 to 0.46 of
the work with 11 to 16 images (Fig. 9b's loss of 50.5 % with text alone asks for 0.34 to 0.5), and the largest of 100
microbatches has 4 to 5 times the operations of the smallest (4.15 in section 1). Without merging these are 24 images,
0.16 to 0.19, and less than 2. Section 2.2's layer times, 6.75 ms for 8 images beside 10.5 ms for 8,192 tokens, ask for
more, about 16 patches a token.

A second of video is 512 tokens: Movie Gen's 16 s at 16 FPS and 256 x 256 pixels, compressed 8 x 8 x 8 and cut 2 x 2,
are 8,192 tokens. Cornstarch's image is 1,024 tokens (EVA-CLIP at 448 pixels in patches of 14) and its 30 s of audio
Whisper's 1,500, so that with 1k text tokens a sample has 2.0k to 3.5k, of its 1.5k to 4k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

from bench.papers.data_sets import IMAGE_TOKENS, Microbatch
from bench.papers.pipeline_layers import Intake, LayerStack, TransformerShape
from mosaic.hardware import Cluster, find_cluster
from mosaic.pipelining.layers import Feed, PipelineModel
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.rank_layer import PLAIN_SHARING, ContextSharing

_PIXELS = 3 * 14 * 14
"""Numbers in a patch of an image."""
_LATENTS = 16 * 2 * 2
"""Numbers in a patch of a video's latents (Movie Gen, arXiv 2410.13720: 16 channels, 2 x 2)."""
_MELS = 80 * 3
"""Numbers under Whisper's first convolution."""


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int = 0, **more: Any) -> TransformerShape:
    return TransformerShape(layers=layers, hidden=hidden, ffn=ffn, heads=heads, groups=groups or heads, **more)


_LLAMA = {"gated": True, "causal": True, "vocabulary": 128256}
_QWEN = {"gated": True, "causal": True, "vocabulary": 152064}

KNOWN_SHAPES: Mapping[str, TransformerShape] = MappingProxyType(
    {
        "vit-5b": _shape(63, 1792, 15360, 16, patch=_PIXELS),
        "vit-22b": _shape(48, 6144, 24576, 48, patch=_PIXELS),
        "llama3-8b": _shape(32, 4096, 14336, 32, 8, **_LLAMA),
        "qwen2-32b": _shape(64, 5120, 27648, 40, 8, **_QWEN),
        "qwen2-72b": _shape(80, 8192, 29568, 64, 8, **_QWEN),
        "dit-5b": _shape(28, 3584, 10240, 28, cross=True, patch=_LATENTS),
        "dit-30b": _shape(48, 6144, 24576, 48, cross=True, patch=_LATENTS),
        "gpt-175b": _shape(96, 12288, 49152, 96, causal=True, vocabulary=50257, tied=True),
        "llama-1b": _shape(16, 2048, 8192, 32, 8, tied=True, **_LLAMA),
        "llama-8b": _shape(32, 4096, 14336, 32, 8, **_LLAMA),
        "llama-32b": _shape(64, 5120, 27648, 40, 8, **_LLAMA),
        "eva-clip-1b": _shape(40, 1408, 6144, 16, patch=_PIXELS),
        "eva-clip-8b": _shape(32, 4096, 20480, 32, patch=_PIXELS),
        "eva-clip-18b": _shape(48, 5120, 25600, 40, patch=_PIXELS),
        "whisper-1b": _shape(32, 1920, 4 * 1920, 30, patch=_MELS),
        "whisper-7b": _shape(40, 3840, 4 * 3840, 60, patch=_MELS),
        "whisper-15b": _shape(48, 5120, 4 * 5120, 80, patch=_MELS),
    }
)
"""Transformers by name: PipeWeaver's Table 3 and Cornstarch's Table 1.

Layers, widths, heads and groups are the papers'. Where they leave out something it is that of the model they name:
gates, vocabularies, and in Cornstarch widths of MLPs and heads. Without cross attention and without a gate the DiTs are
as large as their names say. ViT 5B as printed has 4.3 billion parameters, and would have 6.0 with a gate; it has none,
as ViT 22B has none. GPT 175B is Brown et al. 2020, Table 2.1.
"""


PATCHES_PER_TOKEN = 4
"""Patches merged into a token by its ViTs; see the module docstring."""
VIDEO_TOKENS_PER_S = 512.0
"""Of a second of video in a DiT."""
EVA_TOKENS = 1024
"""Of an image in Cornstarch."""
WHISPER_TOKENS = 1500
"""Of 30 s of audio in Cornstarch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    name: str
    source: str
    vision: str = ""
    """Shape of the encoder of images; empty: it has none."""
    audio: str = ""
    text: str = ""
    """Shape of the language model: the backbone, or before a video decoder its encoder."""
    video: str = ""
    is_frozen: bool = False
    """True if only projectors train."""
    device: str
    degrees: Degrees
    sharing: ContextSharing = PLAIN_SHARING
    """The context ranks' shares of sequences."""

    def cluster(self) -> Cluster:
        """Returns its devices in the paper, in whole nodes."""
        count = self.degrees.num_devices
        return find_cluster(self.device, count if count <= 8 else -(-count // 8) * 8)

    def model(self) -> PipelineModel:
        """Returns its modules as tables of layers, on the paper's devices."""
        modules = tuple(self._modules(RankHardware(cluster=self.cluster(), degrees=self.degrees)))
        last = modules[-1].name
        return PipelineModel(
            modules=modules, feeds=tuple(Feed(source=module.name, target=last) for module in modules[:-1])
        )

    def sample(self) -> Microbatch:
        """Returns Cornstarch's sample."""
        return Microbatch(text_tokens=1024, images=1 if self.vision else 0, audio_s=30.0 if self.audio else 0.0)

    def _modules(self, machine: RankHardware) -> Iterator[LayerStack]:
        starch = self.source.startswith("Cornstarch")
        image, merges = (EVA_TOKENS, 1) if starch else (IMAGE_TOKENS, PATCHES_PER_TOKEN)
        backbone = self.video or self.text
        for name, shape in (("vision", self.vision), ("audio", self.audio), ("text", self.text), ("video", self.video)):
            if not shape:
                continue
            intake = {
                "vision": Intake(unit="image", image_tokens=image * merges, merges=merges),
                "audio": Intake(unit="audio", window_tokens=WHISPER_TOKENS),
                "text": Intake(
                    unit="text",
                    text=True,
                    image_tokens=image if self.vision else 0,
                    window_tokens=WHISPER_TOKENS if self.audio else 0,
                ),
                "video": Intake(unit="video", text=True, video_tokens_per_s=VIDEO_TOKENS_PER_S),
            }[name]
            yield LayerStack(
                name=name,
                shape=KNOWN_SHAPES[shape],
                machine=machine,
                intake=intake,
                is_frozen=self.is_frozen,
                has_head=shape == backbone and not self.video,
                projects_to=0 if shape == backbone else KNOWN_SHAPES[backbone].hidden,
                sharing=self.sharing,
            )


def _pipeweaver() -> Iterator[KnownModel]:
    table_4, table_6 = (f"PipeWeaver, Table {number}" for number in (4, 6))
    rows = (
        ("vlm-s", table_4, "vit-5b", "llama3-8b", "", "h800", (4, 4, 1)),
        ("vlm-m", table_4, "vit-5b", "qwen2-32b", "", "h800", (8, 4, 1)),
        ("vlm-l", table_4, "vit-22b", "qwen2-72b", "", "h800", (8, 8, 1)),
        ("t2v-s", table_4, "", "llama3-8b", "dit-5b", "h800", (4, 4, 1)),
        ("t2v-l", table_4, "", "qwen2-32b", "dit-30b", "h800", (8, 8, 1)),
        ("vlm-xl-8k", table_6, "vit-22b", "gpt-175b", "", "h100-80g", (8, 8, 128)),
        ("vlm-xl-16k", table_6, "vit-22b", "gpt-175b", "", "h100-80g", (8, 16, 128)),
        ("t2v-xl-3k", table_6, "", "qwen2-72b", "dit-30b", "h100-80g", (8, 4, 96)),
        ("t2v-xl-6k", table_6, "", "qwen2-72b", "dit-30b", "h100-80g", (8, 8, 96)),
    )
    for name, source, vision, text, video, device, (tensor, pipeline, data) in rows:
        degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
        yield KnownModel(
            name=name, source=source, vision=vision, text=text, video=video, device=device, degrees=degrees
        )


_VISION = {"s": "eva-clip-1b", "m": "eva-clip-8b", "l": "eva-clip-18b"}
_AUDIO = {"s": "whisper-1b", "m": "whisper-7b", "l": "whisper-15b"}
_TEXT = {"s": "llama-1b", "m": "llama-8b", "l": "llama-32b"}

_NUM_RANKS: Mapping[str, tuple[int, ...]] = {"s": (6, 6, 6, 4, 5, 8), "m": (6, 4, 5, 6, 6, 6), "l": (6, 6, 5, 6, 6, 6)}
"""Cornstarch's Table 5: for each backbone the ranks of backbone and encoder together, with an encoder of images (s, m,
l) and of audio. Tensor and context degrees are 2."""


def _cornstarch() -> Iterator[KnownModel]:
    for text, counts in _NUM_RANKS.items():
        for (kind, size), num_ranks in zip(product(("vlm", "alm"), "sml"), counts, strict=True):
            yield KnownModel(
                name=f"cornstarch-{kind}-{size}-llm-{text}",
                source="Cornstarch, Table 5",
                vision=_VISION[size] if kind == "vlm" else "",
                audio=_AUDIO[size] if kind == "alm" else "",
                text=_TEXT[text],
                is_frozen=True,
                device="a40",
                degrees=Degrees(tensor=2, context=2, pipeline=num_ranks),
                sharing=ContextSharing(items="split"),  # a microbatch has one image, and encoders too 2 context ranks
            )


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {model.name: model for model in (*_pipeweaver(), *_cornstarch())}
)
"""All of them by name."""
