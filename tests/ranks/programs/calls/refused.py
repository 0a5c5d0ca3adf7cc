"""Refusals of a model that is colocated over ranks, and their messages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_  # a name of our own, from before any model is colocated

from mosaic.errors import InvalidPlanError, UnsupportedModelError
from ranks.clip import MEMBERS, Clip, batch_of, mean_loss, told
from ranks.graphs import colocated


def refusals(rank: int) -> dict[str, str]:
    """Returns the messages of refusals while the model is colocated; each ends on both ranks."""
    torch.manual_seed(0)
    model = Clip()
    plain_clip = clip_grad_norm_.__closure__[0].cell_contents
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    batch = batch_of(0, rank)
    missing = model.image if rank else model.audio
    others = nn.ModuleDict({"model": model, "extra": nn.Linear(2, 2)})
    said = {
        "copy": told(lambda: copy.deepcopy(missing)(torch.randn(2, 6 if rank else 4))),
        "part": told(lambda: missing[0](torch.randn(2, 6 if rank else 4))),
        "disabled": told(lambda: handle.disabled().__enter__()),
        "wrapped": told(lambda: nn.parallel.DistributedDataParallel(others), UnsupportedModelError),
    }
    mean_loss(model(**batch)).backward()
    said["norm"] = told(lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert clip_grad_norm_.__closure__[0].cell_contents is not plain_clip
    handle.remove()
    assert clip_grad_norm_.__closure__[0].cell_contents is plain_clip
    with handle.disabled():
        said["whole"] = str(tuple(model(**batch)["logits"].shape))
    attempts: dict[str, Callable[[Clip], object]] = {
        "padding": lambda model: mean_loss(model(**{**batch, "image": batch["image"][:, : 6 - rank]})).item(),
        "keyword": lambda model: model.image(input=batch["image"]).sum().item(),
        "kinds": lambda model: model.image("a photo"),
        "one rank": lambda model: model.image(*((batch["image"],) if rank else (batch["image"], 1))).sum().item(),
    }
    for name, attempt in attempts.items():  # none of these ranks can go on after one
        model = Clip()
        handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
        said[name] = told(lambda attempt=attempt, model=model: attempt(model))
        handle.remove()
    return said


def not_begun(rank: int) -> list[str]:
    """Returns what is said of plans that ranks cannot run together, and of a layer that keeps statistics of a batch."""
    normalized, sample = Clip(), batch_of(0, rank, (3, 3))
    normalized.image = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    others = {**MEMBERS, "image": (rank,)}
    return [
        told(lambda: colocated(Clip(), sample, MEMBERS, 3), InvalidPlanError),
        told(lambda: colocated(Clip(), sample, others, 2), InvalidPlanError),
        told(lambda: colocated(normalized, sample, MEMBERS, 2), UnsupportedModelError),
    ]


def unfrozen(rank: int) -> str:
    """Returns what is said of parameters that train only since the model was colocated, or do not any more."""
    torch.manual_seed(0)
    model = Clip(frozen=("image",))
    handle = colocated(model, batch_of(0, rank, (3, 3)), {**MEMBERS, "image": (0, 1)}, 2)
    model.image.requires_grad_(True)
    said = told(lambda: model(**batch_of(0, rank)))
    model.image.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    said += "; " + told(lambda: model(**batch_of(0, rank)))
    handle.remove()
    return said
