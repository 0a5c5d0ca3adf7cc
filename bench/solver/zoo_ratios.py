"""Table 1 beside the zoo: operations and parameters of its rows' modules, and backbones over encoders. Predicted.

The table's "TFLOPs" are those of forward and backward of dense layers, 6 x 12 x layers x width^2 x tokens: with 512
tokens this gives the 22.27 and 16.70 of its two large language models, with 2,304, 4,096 and 2,048 the 4.17, 2.09 and
1.04 of ImageBind, each to the last digit. It is this column of which backbone over encoders is 8.6, 6.6 and 1.6. Its
language models so read 512 tokens (OFASys's 1,130), where Table 2, said to be its input, has 2,048 of text alone; and
Qwen3-VL's vision, 4096 wide as printed, would read 79 (1,000 with the 1152 of the published model; it reads 1,024).

Ours are counted: products and attention of a forward of one sample, three times for forward and backward. What the
published models do on Table 2's inputs is the size ``paper``; ``table1`` keeps the table's layers, widths and ratios.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from bench.gpu.models.zoo_memory import count_forward
from bench.record import Figure
from bench.solver.study import figure
from bench.solver.table_1 import BACKBONES, ENCODERS, Kind
from mosaic import models

STEP = 3
"""Operations of forward and backward over those of a forward."""
ROWS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "qwen3-vl": {"qwen3vl_llm": ("language_model",), "qwen3vl_vision": ("encoders.image",)},
        "unified-io-2": {
            "uio2_llm": ("encoder", "decoder"),
            "uio2_vision": ("encoders.image", "encoders.image_history"),
            "uio2_audio": ("encoders.audio", "encoders.audio_history"),
        },
        "imagebind": {
            "imagebind_text": ("encoders.text",),
            "imagebind_vision": ("encoders.image",),
            "imagebind_audio": ("encoders.audio",),
        },
        "ofasys": {
            "ofasys_llm": ("encoder", "decoder"),
            "ofasys_vision": ("encoders.image",),
            "ofasys_text": ("encoders.text",),
            "ofasys_audio": ("encoders.audio",),
        },
    }
)
"""By model of the zoo, Table 1's rows and the modules that they are; without texts of one layer, which are embeddings.

The first row is a backbone; ImageBind has none, and its other encoders are compared with its text's."""
_KINDS = {kind.name: kind for kind in (*BACKBONES, *ENCODERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a row of the table does."""

    tera_flops: float
    """Operations of forward and backward of a sample, in 10^12."""
    parameters: float
    """Parameters."""


def printed(kind: Kind) -> Work:
    """Returns a row as Table 1 has it; it prints no parameters, so they are 12 x layers x width^2."""
    return Work(tera_flops=kind.tera_flops, parameters=12.0 * kind.layers * kind.width**2)


def implied_tokens(kind: Kind) -> float:
    """Returns the tokens with which layers of a row's width do its operations, without attention's products."""
    work = printed(kind)
    return work.tera_flops * 1e12 / (2 * STEP * work.parameters)


def counted(model: str, size: str) -> dict[str, Work]:
    """Returns the same rows, counted on tensors without data."""
    entry, meta = models.find_model(model), torch.device("meta")
    made = models.build(model, size, device=meta)
    sample = models.make_batch(model, size, batch=1, device=meta)
    flops = count_forward(made, lambda: made(**sample), (*entry.backbone, *entry.encoders)).flops
    return {
        row: Work(
            tera_flops=STEP * sum(flops.get(path, 0.0) for path in paths) / 1e12,
            parameters=sum(p.numel() for path in paths for p in made.get_submodule(path).parameters()),
        )
        for row, paths in ROWS[model].items()
    }


def ratios(rows: Mapping[str, Work]) -> dict[str, tuple[float, float]]:
    """Returns ratios of operations and of parameters: the backbone over all encoders, or encoders over the text's."""
    first, *others = rows
    if _KINDS[first] in BACKBONES:
        pairs = {"backbone over encoders": ([first], others)}
    else:
        pairs = {f"{other} over {first}": ([other], [first]) for other in others}

    def over(above: Sequence[str], below: Sequence[str], field: str) -> float:
        return sum(getattr(rows[row], field) for row in above) / sum(getattr(rows[row], field) for row in below)

    return {
        name: (over(above, below, "tera_flops"), over(above, below, "parameters"))
        for name, (above, below) in pairs.items()
    }


def table_1_beside_the_zoo(*, sizes: Sequence[str], zoo: Sequence[str] = tuple(ROWS)) -> Iterator[Figure]:
    """Each row's operations and each model's ratios, as counted, with Table 1's own beside them."""
    for model in zoo:
        theirs = {row: printed(_KINDS[row]) for row in ROWS[model]}
        for size in sizes:
            ours = counted(model, size)
            for row, work in ours.items():
                made = figure(
                    f"Table 1, {row}, {model}-{size}: operations of forward and backward, 10^12",
                    [work.tera_flops] if work.tera_flops else [],
                    "predicted",
                    reason="" if work.tera_flops else "this size has no blocks there",
                    paper=f"{theirs[row].tera_flops:.2f}",
                )
                more = {"tokens that the paper's operations imply": f"{implied_tokens(_KINDS[row]):.0f}"}
                yield dataclasses.replace(made, labels=made.labels | more)
            paper = ratios(theirs)
            for name, (flops, parameters) in ratios(ours).items():
                of = f"Table 1, {name}, {model}-{size}"
                yield figure(f"{of}: ratio of operations", [flops], "predicted", paper=f"{paper[name][0]:.2f}")
                made = figure(f"{of}: ratio of parameters", [parameters], "predicted")
                more = {"12 x layers x width^2 of the paper's rows": f"{paper[name][1]:.2f}"}
                yield dataclasses.replace(made, labels=made.labels | more)
