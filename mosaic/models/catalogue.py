"""Every model of the zoo by name and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mosaic.models import (
    clip,
    ctvlm,
    imagebind,
    multitask_clip,
    multitask_ofasys,
    ofasys,
    qwen3_vl,
    qwen_val,
    unified_io2,
)
from mosaic.models.inputs import Draw

Size = Literal["tiny", "public", "paper"]
"""``tiny``: seconds on a CPU; ``public``: as published; ``paper``: Table 1's dimensions on Table 2's inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model."""

    make: Callable[[Any], nn.Module]
    """Makes it from a configuration."""
    batch: Callable[[Any, Draw], dict[str, Any]]
    """Draws a batch for a configuration."""
    sizes: Mapping[str, Any]
    """Its configurations by size; frozen dataclasses, to be changed with ``dataclasses.replace``."""
    frozen: tuple[str, ...] = ()
    """Modules that its original training leaves as they were."""
    modules: tuple[str, ...] | None = None
    """Modules to place where size alone tells the wrong ones; None where it tells the right ones."""


MODELS: Mapping[str, Entry] = MappingProxyType(
    {
        "clip": Entry(make=clip.Clip, batch=clip.make_batch, sizes=clip.SIZES),
        "qwen3-vl": Entry(make=qwen3_vl.Qwen3VL, batch=qwen3_vl.make_batch, sizes=qwen3_vl.SIZES),
        "unified-io-2": Entry(
            make=unified_io2.UnifiedIO2,
            batch=unified_io2.make_batch,
            sizes=unified_io2.SIZES,
            frozen=unified_io2.FROZEN,
            modules=unified_io2.MODULES,
        ),
        "imagebind": Entry(
            make=imagebind.ImageBind, batch=imagebind.make_batch, sizes=imagebind.SIZES, frozen=imagebind.FROZEN
        ),
        "ofasys": Entry(make=ofasys.Ofasys, batch=ofasys.make_batch, sizes=ofasys.SIZES),
        "ctvlm": Entry(make=ctvlm.Ctvlm, batch=ctvlm.make_batch, sizes=ctvlm.SIZES, modules=ctvlm.MODULES),
        "multitask-clip": Entry(
            make=multitask_clip.MultitaskClip, batch=multitask_clip.make_batch, sizes=imagebind.SIZES
        ),
        "multitask-ofasys": Entry(
            make=multitask_ofasys.MultitaskOfasys, batch=multitask_ofasys.make_batch, sizes=ofasys.SIZES
        ),
        "qwen-val": Entry(make=qwen_val.QwenVal, batch=qwen_val.make_batch, sizes=qwen_val.SIZES),
    }
)
"""The paper's six in order of growing complexity, then Spindle's three workloads."""
SIX = tuple(MODELS)[:6]
"""Names of the paper's six."""


def entry_of(name: str) -> Entry:
    """Returns a model's entry.

    Raises:
        ValueError: There is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r} in the zoo; it has {', '.join(MODELS)}")
    return MODELS[name]


def config_of(name: str, size: Size | str) -> Any:
    """Returns a model's configuration, a frozen dataclass.

    Raises:
        ValueError: There is no such model or size.
    """
    sizes = entry_of(name).sizes
    if size not in sizes:
        raise ValueError(f"there is no size {size!r}; {name} has {', '.join(sizes)}")
    return sizes[size]


def build(
    name: str,
    size: Size | str = "tiny",
    *,
    config: Any = None,
    freeze: Sequence[str] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Makes a model with random weights; the same ones for the same seed.

    Its forward takes a batch as keywords and returns a dictionary with ``loss``. The caller's random numbers are left
    as they were.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        config: A configuration in the place of a size's.
        freeze: Names of modules whose parameters do not train; ``entry_of(name).frozen`` for what the original froze.
        device: Where it is made; ``meta`` for one without data.
        seed: Of its weights.

    Raises:
        ValueError: There is no such model or size, or ``freeze`` names what the model does not have.
    """
    entry, device = entry_of(name), torch.device(device)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), device:
        torch.manual_seed(seed)
        model = entry.make(config_of(name, size) if config is None else config)
    modules = dict(model.named_modules())
    for part in freeze:
        if part not in modules:
            has = ", ".join(child for child, _ in model.named_children())
            raise ValueError(f"{name} has no module {part!r} to freeze; it has {has}")
        modules[part].requires_grad_(False)
    return model


def make_batch(
    name: str,
    size: Size | str = "tiny",
    *,
    batch: int = 4,
    config: Any = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    **choice: Any,
) -> dict[str, Any]:
    """Draws a batch of random samples, keywords of the model's forward; the same ones for the same seed.

    Args:
        name: One of ``MODELS``.
        size: One of its sizes.
        batch: Samples; of each task, for models of several.
        config: A configuration in the place of a size's.
        device: Where it is made; ``meta`` for shapes alone.
        seed: Of its numbers.
        choice: What the model's own ``make_batch`` takes: ``video=True`` for qwen3-vl, ``tasks=[...]`` for those of
            several tasks.

    Raises:
        ValueError: There is no such model or size, or the batch cannot be made.
    """
    entry = entry_of(name)
    config = config_of(name, size) if config is None else config
    return entry.batch(config, Draw(config.inputs, batch, torch.device(device), seed), **choice)


def loss_of(output: Mapping[str, Tensor]) -> Tensor:
    """Returns the loss of what a model returned.

    Raises:
        ValueError: The batch had nothing to learn from.
    """
    if "loss" not in output:
        raise ValueError(
            f"the model returned {', '.join(output) or 'nothing'} and no loss; give it a batch with targets"
        )
    return output["loss"]
