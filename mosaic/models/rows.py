"""The zoo's table: each model's sizes, as layers and widths.

``paper`` has the layers and widths of the main paper's Table 1 and the samples of its Table 2. Table 1's FLOPs are
those of other numbers of tokens; ``table1`` has its layers and widths, and its ratios of FLOPs within 3 %. ``gpu`` is
``paper`` with a share of its layers and vocabulary that trains on one GPU of 80 GB with ``gpu_batch`` samples. ``tiny``
is for tests. ``public`` is the published model of transformers. CLIP and CTVLM are not in Table 1. CLIP is ViT-L/14's
towers. CTVLM's dimensions are not published; ours are ViT-B/16 before TinyLlama and ViT-L before LLaMA-2 7B. Vision and
audio of Qwen3-VL and Unified-IO 2 are as published if the table's column cannot be right (lab notes in
`bench/README.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal

from mosaic.models.layers import Blocks, Encoder
from mosaic.models.multimodal import Config, Contrast, Decode, Denoise, Mutual, Target, Task, Translate
from mosaic.models.published import Published

Size = Config | Mutual | Published


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model of the zoo."""

    name: str
    """Name, as in ``--model zoo:NAME-SIZE``."""
    sizes: Mapping[str, Size]
    source: str
    """Source of its sizes."""
    workload: Literal["mosaic", "spindle", "pipeweaver"] | None = None
    """The paper that measures it: Mosaic (Tables 1 and 2), Spindle (section 5) or PipeWeaver (Table 4)."""
    frozen: tuple[str, ...] = ()
    """Modules frozen in its original training, for ``build(..., freeze=)``."""
    gpu_batch: int = 8
    """Batch size with which the size ``gpu`` fits into 80 GB, counted."""
    modules: tuple[str, ...] | None = None
    """Modules to place; None: found by tracing."""


def _row(name: str, paper: Config | Mutual, share: float, source: str, **more: Any) -> Row:
    sizes = {"tiny": paper.tiny(), "gpu": paper.cut(share), "paper": paper} | more.pop("sizes", {})
    return Row(name=name, sizes=sizes, source=source, workload="mosaic", **more)


def _image(layers: int, width: int, heads: int, *, px: int = 512, patch: int = 16, **more: Any) -> Encoder:
    blocks = Blocks(layers=layers, width=width, heads=heads, mlp=more.pop("mlp", None))
    return Encoder(sample=(more.pop("channels", 3), px, px), patch=(patch, patch), blocks=blocks, **more)


def _sound(layers: int, width: int, heads: int, *, mels: int = 128, frames: int = 800, **more: Any) -> Encoder:
    return Encoder(sample=(1, mels, frames), blocks=Blocks(layers=layers, width=width, heads=heads), **more)


def _words(layers: int, width: int, heads: int, tokens: int, vocabulary: int = 0) -> Encoder:
    return Encoder(sample=(tokens,), vocabulary=vocabulary, blocks=Blocks(layers=layers, width=width, heads=heads))


def _llama(layers: int, width: int, heads: int, mlp: int, **more: Any) -> Blocks:
    return Blocks(layers=layers, width=width, heads=heads, mlp=mlp, llama=True, **more)


# Contrast: CLIP, ImageBind and Spindle's Multitask-CLIP.

CLIP_WORDS = 49_408
_CLIP = Config(
    encoders={"image": _image(24, 1024, 16), "text": _words(12, 768, 12, 2048, CLIP_WORDS)},
    fusion=Contrast(width=768, pairs=(("image", "text"),)),
)
MODALITIES = ("image", "audio", "text", "depth", "thermal", "imu")
"""Towers of ImageBind, those of Table 1 first."""
_IMAGEBIND = Config(
    encoders={
        "image": _image(24, 1024, 16),
        "audio": _sound(12, 768, 12, patch=(16, 16), stride=(10, 10)),
        "text": _words(12, 768, 12, 2048, CLIP_WORDS),
        "depth": _image(12, 384, 8, px=224, channels=1),
        "thermal": _image(12, 768, 12, px=256, channels=1),
        "imu": Encoder(sample=(6, 800), patch=(8,), blocks=Blocks(layers=6, width=512, heads=8)),
    },
    fusion=Contrast(width=768, pairs=tuple(("image", other) for other in MODALITIES[1:])),
)
_IMAGEBIND_TABLE_1 = replace(
    _IMAGEBIND,
    encoders={
        **_IMAGEBIND.encoders,
        "image": _image(24, 1024, 16, patch=11),
        "audio": _sound(12, 768, 12, patch=(16, 16), stride=(5, 6)),
    },
)
_PAIRS = tuple(combinations(("image", "text", "audio", "depth", "thermal", "imu"), 2))[:9]
CLIP_TASKS: Mapping[str, Task] = {
    f"{first}_{second}": Task(reads=(first, second)) for first, second in (*_PAIRS, ("audio", "depth"))
}
"""Ten of the fifteen pairs: images with all others, text with the other four. Spindle does not name its ten."""
_MULTITASK_CLIP = Config(
    encoders={
        "image": _image(32, 1280, 16, px=224, patch=14),
        "audio": _sound(12, 768, 12, frames=204, patch=(16, 16), stride=(10, 10)),
        "text": _words(24, 1024, 16, 77, CLIP_WORDS),
        "depth": _image(12, 384, 8, px=224, channels=1),
        "thermal": _image(12, 768, 12, px=224, channels=1),
        "imu": Encoder(sample=(6, 2000), patch=(8,), blocks=Blocks(layers=6, width=512, heads=8)),
    },
    fusion=Contrast(width=1024, pairs=tuple(task.reads for task in CLIP_TASKS.values())),  # type: ignore[misc]
    tasks=CLIP_TASKS,
)

# Decode: Qwen3-VL, CTVLM and Spindle's QWen-VAL.

# the published vision has three more MLPs, one per tap of DeepStack; here one of four times the width
_QWEN3_VISION = _image(27, 1152, 16, mlp=4304, merged=4, projector=4 * 4 * 1152)
_QWEN3_VL = Config(
    encoders={"image": _QWEN3_VISION},
    fusion=Decode(blocks=_llama(36, 4096, 32, 12_288, kv_heads=8, head_width=128), vocabulary=151_936, tokens=2048),
)
_QWEN3_VL_TABLE_1 = Config(
    encoders=_QWEN3_VL.encoders,
    fusion=replace(_QWEN3_VL.fusion, tokens=656),  # type: ignore[arg-type]
)
_CTVLM = Mutual(
    small=Config(
        encoders={"image": _image(12, 768, 12, projector=2048)},
        fusion=Decode(blocks=_llama(22, 2048, 32, 5632, kv_heads=4), vocabulary=32_000, tokens=3072),
    ),
    large=Config(
        encoders={"image": _image(24, 1024, 16, projector=4096)},
        fusion=Decode(blocks=_llama(32, 4096, 32, 11_008), vocabulary=32_000, tokens=3072),
    ),
)
QWEN_TASKS: Mapping[str, Task] = {
    "vision-language": Task(reads=("image",)),
    "audio-language": Task(reads=("audio",)),
    "vision-audio-language": Task(reads=("image", "audio")),
}


def _qwen_val(language: Blocks, image_px: int, image_patch: int, frames: int) -> Config:
    """QWen-VAL: Qwen-VL's vision (48 x 1664) and Qwen-Audio's (32 x 1280) before one language model."""
    adapter = Blocks(layers=1, width=language.width, heads=language.heads, mlp=0)
    return Config(
        encoders={
            "image": _image(48, 1664, 16, mlp=8192, px=image_px, patch=image_patch, latents=256, resampler=adapter),
            "audio": Encoder(sample=(80, frames), patch=(2,), merged=2, blocks=Blocks(layers=32, width=1280, heads=20)),
        },
        fusion=Decode(blocks=language, vocabulary=151_936, tokens=2048),
        tasks=QWEN_TASKS,
    )


_QWEN_VAL = _qwen_val(_llama(32, 4096, 32, 11_008), 448, 14, 3000)

# Denoise: PipeWeaver's T2V-S, a DiT of 5 billion parameters behind Llama 3 8B, on two seconds of 512 px. The papers do
# not say which encoder makes the latents: ours cuts 4 x 32 x 32 pixels, and its blocks are our choice.

_T2V = Config(
    encoders={
        "video": Encoder(sample=(3, 16, 512, 512), patch=(4, 32, 32), blocks=Blocks(layers=4, width=512, heads=8)),
        "text": Encoder(sample=(256,), vocabulary=128_256, blocks=_llama(32, 4096, 32, 14_336, kv_heads=8)),
    },
    fusion=Denoise(blocks=Blocks(layers=28, width=3584, heads=28, mlp=10_240), channels=64),
)

# Translate: Unified-IO 2, OFASys and Spindle's multitask OFASys.


def _unified(*, text: int, image_codes: int, audio_codes: int, latents: tuple[int, int], merged: int) -> Config:
    blocks = _llama(24, 3072, 24, 8192, head_width=128)
    history: dict[str, Any] = {"count": 4, "resampler": Blocks(layers=2, width=1024, heads=16)}
    return Config(
        encoders={
            "text": _words(0, 3072, 24, text),
            "image": _image(11, 768, 12, merged=merged),
            "audio": _sound(11, 768, 12, patch=(16, 16), merged=merged),
            "image_history": _image(11, 768, 12, px=256, latents=latents[0], **history),
            "audio_history": _sound(11, 768, 12, frames=256, patch=(16, 16), latents=latents[1], **history),
        },
        fusion=Translate(
            encoder=blocks,
            decoder=blocks,
            vocabulary=58_112,
            targets={
                "text": Target(tokens=text, ids=(0, 33_280)),
                "image": Target(tokens=image_codes, ids=(33_280, 49_792)),
                "audio": Target(tokens=audio_codes, ids=(49_792, 58_112)),
            },
        ),
    )


_UNIFIED = _unified(text=2048, image_codes=1024, audio_codes=512, latents=(32, 16), merged=1)
UNIFIED_ENCODERS = tuple(f"encoders.{name}" for name in ("image", "audio", "image_history", "audio_history"))

OFASYS_WORDS, OFASYS_IDS = 50_265, 59_457
"""Ids of words, followed by an image's 8,192 codes and a box's 1,000 bins."""
OFASYS_LAYERS: Mapping[str, int] = {"image": 8, "text": 4, "audio": 6} | dict.fromkeys(
    ("video", "motion", "box", "phone", "struct", "category"), 2
)
"""Layers of each adaptor: from Table 1, otherwise two (our choice)."""


def _ofasys(
    layers: Mapping[str, int], stacks: tuple[int, int], width: int, *, image_px: int, image_patch: int, merged: int = 1,
    video: tuple[int, int, int], video_patch: int, mels: int, text: int, written: int, image_codes: int,
) -> Config:  # fmt: skip
    encoder, decoder = (Blocks(layers=count, width=width, heads=16) for count in stacks)
    of = {name: Blocks(layers=layers.get(name, 0), width=width, heads=16) for name in OFASYS_LAYERS}
    tokens = {"text": text, "box": 64, "phone": 256, "struct": 512, "category": 16}
    words = {name: Encoder(sample=(count,), blocks=of[name], merged=merged) for name, count in tokens.items()}
    encoders = {
        "image": Encoder(sample=(3, image_px, image_px), patch=(image_patch,) * 2, blocks=of["image"], merged=merged),
        "text": words["text"],
        "audio": Encoder(sample=(1, mels, 800), convolutions=True, blocks=of["audio"], merged=merged),
        "video": Encoder(sample=(3, *video), patch=(2, video_patch, video_patch), blocks=of["video"], merged=merged),
        "motion": Encoder(sample=(144, 256), patch=(1,), blocks=of["motion"], merged=merged),
        **{name: words[name] for name in ("box", "phone", "struct", "category")},
    }
    targets = {
        "text": Target(tokens=written, ids=(0, OFASYS_WORDS)),
        "image": Target(tokens=image_codes, ids=(OFASYS_WORDS, OFASYS_IDS - 1000)),
        "box": Target(tokens=64, ids=(OFASYS_IDS - 1000, OFASYS_IDS)),
        "category": Target(tokens=16, ids=(0, OFASYS_WORDS)),
        "audio": Target(tokens=200, features=4 * mels),
        "motion": Target(tokens=256, features=144),
    }
    fusion = Translate(encoder=encoder, decoder=decoder, vocabulary=OFASYS_IDS, targets=targets)
    return Config(encoders=encoders, fusion=fusion)


_OFASYS_PAPER: dict[str, Any] = {
    "image_px": 512, "image_patch": 16, "video": (32, 512, 512), "video_patch": 64, "mels": 128, "text": 2048,
}  # fmt: skip
_OFASYS = _ofasys(OFASYS_LAYERS, (24, 12), 1280, written=2048, image_codes=1024, **_OFASYS_PAPER)
_OFASYS_TABLE_1 = _ofasys(OFASYS_LAYERS, (24, 12), 1280, written=512, image_codes=256, merged=8, **_OFASYS_PAPER)
OFASYS_TASKS: Mapping[str, Task] = {
    "summarization": Task(reads=("text",), writes=("text",)),
    "captioning": Task(reads=("text", "image"), writes=("text",)),
    "grounding": Task(reads=("text", "image"), writes=("box",)),
    "speech_recognition": Task(reads=("text", "audio"), writes=("text",)),
    "text_to_sql": Task(reads=("text", "struct"), writes=("text",)),
    "video_captioning": Task(reads=("text", "video"), writes=("text",)),
    "text_to_motion": Task(reads=("text",), writes=("motion",)),
}
"""Seven tasks: Spindle's five, and video captioning and motion from text (our choice)."""
_MULTITASK_OFASYS = replace(
    _ofasys(
        {"image": 18}, (12, 12), 1024, image_px=224, image_patch=14, video=(8, 224, 224), video_patch=32, mels=80,
        text=512, written=512, image_codes=1024,
    ),
    tasks=OFASYS_TASKS,
)  # fmt: skip
_MULTITASK_OFASYS_TINY = replace(
    _ofasys(dict.fromkeys(OFASYS_LAYERS, 1), (2, 2), 32, written=16, image_codes=16, **_OFASYS_PAPER).tiny(),
    tasks=OFASYS_TASKS,
)


_ROWS = (
    _row("clip", _CLIP, 1, "Radford et al. 2021", sizes={"public": Published("clip")}),
    _row(
        "qwen3-vl",
        _QWEN3_VL,
        1 / 6,
        "Bai et al. 2025",
        gpu_batch=4,
        sizes={"table1": _QWEN3_VL_TABLE_1, "public": Published("qwen3-vl")},
    ),
    _row(
        "unified-io-2",
        _UNIFIED,
        1 / 8,
        "Lu et al. 2024",
        gpu_batch=4,
        frozen=tuple(f"{encoder}.{part}" for encoder in UNIFIED_ENCODERS for part in ("tokens", "stack")),
        modules=(*UNIFIED_ENCODERS, "encoder", "decoder"),
        sizes={"table1": _unified(text=160, image_codes=64, audio_codes=32, latents=(8, 4), merged=16)},
    ),
    _row(
        "imagebind",
        _IMAGEBIND,
        1,
        "Girdhar et al. 2023",
        frozen=("encoders.image", "encoders.text"),
        sizes={"table1": _IMAGEBIND_TABLE_1},
    ),
    _row("ofasys", _OFASYS, 1 / 2, "Bai et al. 2022", gpu_batch=2, sizes={"table1": _OFASYS_TABLE_1}),
    _row(
        "ctvlm",
        _CTVLM,
        1 / 8,
        "Lu et al., ACM MM 2024; a stand-in",
        gpu_batch=4,
        modules=tuple(f"{size}.{part}" for size in ("small", "large") for part in ("encoders.image", "language_model")),
    ),
    Row(
        name="multitask-clip",
        sizes={"tiny": _MULTITASK_CLIP.tiny(), "spindle": _MULTITASK_CLIP},
        source="Spindle, section 5 and appendix C",
        workload="spindle",
        modules=tuple(f"encoders.{name}" for name in MODALITIES),
    ),
    Row(
        name="multitask-ofasys",
        sizes={"tiny": _MULTITASK_OFASYS_TINY, "spindle": _MULTITASK_OFASYS},
        source="Spindle, section 5 and appendix C",
        workload="spindle",
    ),
    Row(
        name="qwen-val",
        sizes={
            "tiny": _QWEN_VAL.tiny(),
            "spindle": _QWEN_VAL,
            # language models of LLaMA's sizes on Table 2's samples; Spindle has no dimensions
            "30b": _qwen_val(_llama(60, 6656, 52, 17_920), 512, 16, 800),
            "70b": _qwen_val(_llama(80, 8192, 64, 28_672), 512, 16, 800),
        },
        source="Spindle, appendix C",
        workload="spindle",
    ),
    Row(
        name="t2v",
        sizes={"tiny": _T2V.tiny(), "gpu": _T2V.cut(1 / 8), "paper": _T2V},
        source="PipeWeaver, Tables 3 and 4",
        workload="pipeweaver",
        frozen=("encoders.video",),
        modules=("encoders.video", "encoders.text", "transformer"),
    ),
    Row(
        name="llava",
        sizes={"tiny": Published("llava", is_tiny=True), "public": Published("llava")},
        source="Liu et al. 2023",
    ),
)

MODELS: Mapping[str, Row] = MappingProxyType({row.name: row for row in _ROWS})
"""Models by name; those of the main paper first, in its order of complexity."""
PAPER_MODELS = tuple(name for name, row in MODELS.items() if row.workload == "mosaic")
"""Names of the six models measured in Mosaic's paper."""
