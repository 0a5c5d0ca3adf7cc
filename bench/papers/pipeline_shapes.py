"""The one table of transformers known by name: PipeWeaver's Table 3 and Cornstarch's Table 1.

Layers, widths, heads and groups are the papers'. Where they leave out something it is that of the model they name:
gates, vocabularies, and in Cornstarch widths of MLPs and heads. Without cross attention and without a gate the DiTs are
as large as their names say. ViT 5B as printed has 4.3 billion parameters, and would have 6.0 with a gate; it has none,
as ViT 22B has none. GPT 175B is Brown et al. 2020, Table 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bench.papers.pipeline_layers import TransformerShape

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
"""By name."""
