"""The six models that are measured: ``mosaic.models`` at the paper's size, cut to the memory that a device has.

``python -m bench.gpu.models.zoo [--memory-gib 78]`` prints what is chosen.

Inputs are those of Table 2, widths those of Table 1. Where a model does not fit, all its stacks of blocks lose the same
part of their layers and its vocabularies the same part of their words, so that what cannot overlap (a language model
after its encoders, a head) keeps its share of the step. A part is taken only where, counted, the ratio of the
backbone's operations to the encoders' stays within ``MAX_TILT``: rounding 11 and 24 layers may not make another model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from bench.gpu.models.zoo_memory import Forward, count_forward, needed_bytes, shift_of, tilt_of, usable_bytes
from mosaic import models
from mosaic.errors import MosaicError
from mosaic.models.layers.block import Shape

Sizes = Literal["paper", "tiny"]

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "clip": "ViT-L/16 and its text tower; not in Table 1",
        "qwen3-vl": "Qwen3-VL-8B as published",
        "unified-io-2": "XXL as published",
        "imagebind": "Table 1's three towers; depth, thermal and IMU as published",
        "ofasys": "six encoders beyond Table 1's three have two layers each, which is our choice",
        "ctvlm": "stand-in: nothing public tells its layers; TinyLlama's language model beside LLaMA-2 7B's",
    }
)
"""What each model is when it is whole, in order of growing complexity."""
MAX_BATCH = 8
"""Samples of a step where memory holds them."""
RATIOS = tuple(Fraction(*ratio) for ratio in ((1, 1), (3, 4), (2, 3), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (1, 12)))
"""Parts of a model that may be kept, falling."""
ENOUGH = Fraction(1, 8)
"""Part of a model below which a smaller batch is better than fewer layers."""
MAX_SHIFT = 0.05
"""Most of a step's operations by which any set of modules may gain or lose share where layers are cut."""
MAX_TILT = 0.25
"""Most by which the ratio of a backbone's operations to its encoders' may change, or of two encoders without one: stems
and mergers are not cut, so that encoders of few layers weigh more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model that a device's memory can train."""

    name: str
    """Of the model."""
    config: Any
    """Its configuration."""
    batch: int
    """Samples of a step."""
    ratio: Fraction
    """Part of the layers that was kept."""
    needed_bytes: int
    """What training takes by the count."""
    memory_bytes: int
    """What the device has."""
    note: str
    """What the model is, and what was cut."""


def fit(name: str, *, memory_bytes: int, batch: int = MAX_BATCH) -> Fit:
    """Chooses how much of a model is kept and how many samples a step has.

    The batch stays as it is asked for while at least ``ENOUGH`` of the model fits beside it, and is halved otherwise;
    where that does not help, the largest part of the model that fits is taken.

    Raises:
        ValueError: ``batch`` is below 1.
        MosaicError: The smallest part does not fit with one sample.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}; a step has one sample or more")
    batches = [batch >> halved for halved in range(batch.bit_length())]
    choices = [(ratio, samples) for samples in batches for ratio in RATIOS if ratio >= ENOUGH]
    choices += [(ratio, samples) for ratio in RATIOS if ratio < ENOUGH for samples in batches]
    chosen = next((choice for choice in choices if _fits(name, *choice, memory_bytes)), None)
    if chosen is None:
        smallest = next(ratio for ratio in reversed(RATIOS) if _is_itself(name, ratio))
        least = needed_bytes(counted(name, smallest), batch=1)
        raise MosaicError(
            f"{name} needs {least / 2**30:.0f} GiB with {smallest} of its layers and one sample; this device has "
            f"{memory_bytes / 2**30:.0f} GiB, of which {usable_bytes(memory_bytes) / 2**30:.0f} can be used: measure a "
            "smaller model or take a larger device"
        )
    ratio, samples = chosen
    config = cut(config_of(name, "paper"), ratio)
    notes = [NOTES[name], _note(name, config, ratio)]
    if samples < batch:
        notes.append(f"a batch of {samples}, since {batch} would leave too little of it")
    return Fit(
        name=name,
        config=config,
        batch=samples,
        ratio=ratio,
        needed_bytes=needed_bytes(counted(name, ratio), batch=samples),
        memory_bytes=memory_bytes,
        note="; ".join(notes),
    )


def config_of(name: str, size: Sizes) -> Any:
    """Returns a model's configuration: as tiny as the zoo has it, or the whole of it."""
    config = models.config_of(name, size)
    if name == "imagebind":  # what skips blocks by chance lets two runs differ, whoever runs them
        still = {tower: replace(getattr(config, tower), drop_path=0.0) for tower in ("audio", "imu")}
        config = replace(config, imu_dropout=0.0, **still)
    return _rehearsed(name, config) if size == "tiny" else config


def build(name: str, *, size: Sizes = "paper", config: Any = None, device: torch.device, seed: int = 0) -> nn.Module:
    """Makes a model with random weights on a device; the same weights for the same seed.

    ``config`` is that of a ``Fit``, in the place of a size's.
    """
    return models.build(name, config=config or config_of(name, size), device=device, seed=seed)


def make_batch(
    name: str, *, size: Sizes = "paper", config: Any = None, batch: int, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    """Makes a random batch with everything that the model reads and writes; ``config`` as in ``build``."""
    return models.make_batch(name, batch=batch, config=config or config_of(name, size), device=device, seed=seed)


def cut(config: Any, ratio: Fraction) -> Any:
    """Returns a configuration with a part of the layers of every stack and of the words of every vocabulary."""
    if ratio == 1:
        return config
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Shape):
            changes[field.name] = replace(value, layers=_layers(value.layers, ratio))
        elif field.name in ("vocabulary", "words", "codes", "bins"):
            changes[field.name] = _words(value, ratio)
        elif field.name == "vocabularies":
            changes[field.name] = tuple(_words(words, ratio) for words in value)
        elif field.name == "own_layers":
            changes[field.name] = tuple((modality, _layers(layers, ratio)) for modality, layers in value)
        elif field.name == "deepstack":  # the same part of them, after the same part of the blocks
            fewer = value[-_layers(len(value), ratio) :]
            changes[field.name] = tuple(sorted({_layers(index + 1, ratio) - 1 for index in fewer}))
        elif is_dataclass(value):
            changes[field.name] = cut(value, ratio)
    made = replace(config, **changes)
    if hasattr(made, "image_id"):  # the last words are placeholders
        words = made.language.vocabulary
        made = replace(made, image_id=words - 2, video_id=words - 1)
    return made


def shift(name: str, ratio: Fraction) -> float:
    """Returns the most by which a set of a model's modules gains or loses share of the operations where it is cut."""
    return shift_of(counted(name, RATIOS[0]), counted(name, ratio))


def tilt(name: str, ratio: Fraction) -> float:
    """Returns the most by which backbone over encoders changes where a model is cut, or one encoder over another."""
    model = models.find_model(name)
    groups = [model.backbone, model.encoders] if model.backbone else [[encoder] for encoder in model.encoders]
    return tilt_of(counted(name, RATIOS[0]), counted(name, ratio), groups)


def _fits(name: str, ratio: Fraction, batch: int, memory_bytes: int) -> bool:
    usable = usable_bytes(memory_bytes)
    if ratio * needed_bytes(counted(name, RATIOS[0]), batch=batch) > 1.2 * usable:  # far too much: not worth counting
        return False
    return needed_bytes(counted(name, ratio), batch=batch) <= usable and _is_itself(name, ratio)


def _is_itself(name: str, ratio: Fraction) -> bool:
    return shift(name, ratio) <= MAX_SHIFT and tilt(name, ratio) <= MAX_TILT


@cache
def counted(name: str, ratio: Fraction) -> Forward:
    """Returns the count of one sample through a part of a model."""
    meta, config = torch.device("meta"), cut(config_of(name, "paper"), ratio)
    model = build(name, config=config, device=meta)
    sample = make_batch(name, config=config, batch=1, device=meta)
    entry = models.find_model(name)
    return count_forward(model, lambda: model(**sample), (*entry.backbone, *entry.encoders))


def _layers(layers: int, ratio: Fraction) -> int:
    return max(1, round(layers * ratio))


def _words(words: int, ratio: Fraction) -> int:
    """Keeps to multiples of 64, with which matrix products are fast."""
    return max(64, 64 * round(words * ratio / 64))


def _note(name: str, config: Any, ratio: Fraction) -> str:
    if ratio == 1:
        return "nothing is cut"
    whole = dict(_depths(config_of(name, "paper")))
    kept = ", ".join(f"{path} {layers} of {whole[path]}" for path, layers in _depths(config))
    return (
        f"cut to {ratio} of its layers and words ({kept} layers), by which no set of its modules gains or loses "
        f"more than {shift(name, ratio):.1%} of the step's operations, and no ratio of backbone and encoders more than "
        f"{tilt(name, ratio):.1%}"
    )


def _depths(config: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yields each stack's place in a configuration and its layers."""
    for field in fields(config):
        value, place = getattr(config, field.name), f"{path} {field.name}".removesuffix(" shape").strip()
        if isinstance(value, Shape):
            yield place, value.layers
        elif field.name == "own_layers":
            yield from value
        elif is_dataclass(value):
            yield from _depths(value, place)


def _rehearsed(name: str, config: Any) -> Any:
    """Returns a tiny configuration; the one whose whole path a dry run has to see has one layer, for busy machines."""
    if name == "clip":
        return replace(config, vision=replace(config.vision, layers=1), text=replace(config.text, layers=1))
    return config


def main() -> None:
    """Prints what is chosen for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-gib", type=float, nargs="+", default=[78.0, 139.0], help="memory of a device")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, where they fit")
    given = parser.parse_args()
    print("| device | model | batch | kept | parameters | needed, counted | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for gib in given.memory_gib:
        for name in NOTES:
            made = fit(name, memory_bytes=int(gib * 2**30), batch=given.batch)
            parameters = counted(name, made.ratio).parameters
            print(
                f"| {gib:g} GiB | {name} | {made.batch} | {made.ratio} | {parameters / 1e9:.2f} B "
                f"| {made.needed_bytes / 2**30:.0f} GiB | {made.note} |"
            )


if __name__ == "__main__":
    main()
