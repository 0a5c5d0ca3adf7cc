"""The one table of transformers known by name: PipeWeaver's Table 3 and Cornstarch's Table 1.

Layers, widths, heads and groups are the papers'. Where they leave out something it is that of the model they name:
gates, vocabularies, and in Cornstarch widths of MLPs and heads. Without cross attention and without a gate the DiTs are
as large as their names say. ViT 5B as printed has 4.3 billion parameters, and would have 6.0 with a gate; it has none,
as ViT 22B has none. Shapes of PipeWeaver's Table 1, which prints none, are Llama 2 7B, 24 of its layers, and ViT-G/14
(Zhai et al. 2022, arXiv 2106.04560).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bench.papers.pipeline_layers import TransformerShape

_PIXELS = 3 * 14 * 14
"""Numbers in a patch of an image."""
_LATENTS = 16 * 2 * 2
"""Numbers in a patch of a video's latents (Movie Gen, arXiv 2410.13720: 16 channels, 2 x 2)."""
_MELS = 80 * 3
"""Numbers under Whisper's first convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """A shape and what it is called."""

    shape: TransformerShape
    """Sizes."""
    billions: float
    """Parameters by its name, in 10^9."""
    source: str
    """Paper and table."""


def _shape(
    layers: int, hidden: int, ffn: int, heads: int, groups: int = 0, *, billions: float, source: str, **more: Any
) -> KnownShape:
    shape = TransformerShape(layers=layers, hidden=hidden, ffn=ffn, heads=heads, groups=groups or heads, **more)
    return KnownShape(shape=shape, billions=billions, source=source)


_WEAVER, _STARCH = "PipeWeaver, Table 3", "Cornstarch, Table 1"
_LLAMA = {"gated": True, "causal": True, "vocabulary": 128256}
_QWEN = {"gated": True, "causal": True, "vocabulary": 152064}

KNOWN_SHAPES: Mapping[str, KnownShape] = MappingProxyType(
    {
        "vit-5b": _shape(63, 1792, 15360, 16, billions=5, source=_WEAVER, patch=_PIXELS),
        "vit-22b": _shape(48, 6144, 24576, 48, billions=22, source=_WEAVER, patch=_PIXELS),
        "llama3-8b": _shape(32, 4096, 14336, 32, 8, billions=8, source=_WEAVER, **_LLAMA),
        "qwen2-32b": _shape(64, 5120, 27648, 40, 8, billions=32, source=_WEAVER, **_QWEN),
        "qwen2-72b": _shape(80, 8192, 29568, 64, 8, billions=72, source=_WEAVER, **_QWEN),
        "dit-5b": _shape(28, 3584, 10240, 28, billions=5, source=_WEAVER, cross=True, patch=_LATENTS),
        "dit-30b": _shape(48, 6144, 24576, 48, billions=30, source=_WEAVER, cross=True, patch=_LATENTS),
        "gpt-175b": _shape(
            96,
            12288,
            49152,
            96,
            billions=175,
            source="Brown et al. 2020, Table 2.1",
            causal=True,
            vocabulary=50257,
            tied=True,
        ),
        "lm-7b": _shape(
            32, 4096, 11008, 32, billions=7, source="ours, as Llama 2 7B", gated=True, causal=True, vocabulary=32000
        ),
        "lm-5b": _shape(
            24,
            4096,
            11008,
            32,
            billions=5,
            source="ours, 24 layers of Llama 2 7B",
            gated=True,
            causal=True,
            vocabulary=32000,
        ),
        "vit-2b": _shape(48, 1664, 8192, 16, billions=2, source="ours, as ViT-G/14", patch=_PIXELS),
        "llama-1b": _shape(16, 2048, 8192, 32, 8, billions=1.2, source=_STARCH, tied=True, **_LLAMA),
        "llama-8b": _shape(32, 4096, 14336, 32, 8, billions=8, source=_STARCH, **_LLAMA),
        "llama-32b": _shape(64, 5120, 27648, 40, 8, billions=32, source=_STARCH, **_LLAMA),
        "eva-clip-1b": _shape(40, 1408, 6144, 16, billions=1, source=_STARCH, patch=_PIXELS),
        "eva-clip-8b": _shape(32, 4096, 20480, 32, billions=8, source=_STARCH, patch=_PIXELS),
        "eva-clip-18b": _shape(48, 5120, 25600, 40, billions=18, source=_STARCH, patch=_PIXELS),
        "whisper-1b": _shape(32, 1920, 4 * 1920, 30, billions=1.4, source=_STARCH, patch=_MELS),
        "whisper-7b": _shape(40, 3840, 4 * 3840, 60, billions=7, source=_STARCH, patch=_MELS),
        "whisper-15b": _shape(48, 5120, 4 * 5120, 80, billions=15, source=_STARCH, patch=_MELS),
    }
)
"""By name."""
