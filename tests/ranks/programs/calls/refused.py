"""Refusals of a model that is colocated over ranks, and their messages."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_  # a name of our own, from before any model is colocated

from mosaic.errors import InvalidPlanError, UnsupportedModelError
from ranks.graphs import colocated
from ranks.training import MEMBERS, Model, batch_of, loss_of, told


def refusals(rank: int) -> None:
    """Refusals while the model is colocated; each ends on both ranks."""
    torch.manual_seed(0)
    model = Model()
    plain_clip = clip_grad_norm_.__closure__[0].cell_contents
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    batch = batch_of(0, rank)
    missing, where = (model.image, "'image' are on rank 0") if rank else (model.audio, "'audio' are on rank 1")
    assert where in told(lambda: copy.deepcopy(missing)(torch.randn(2, 6 if rank else 4)))
    assert where in told(lambda: missing[0](torch.randn(2, 6 if rank else 4)))
    assert "handle.remove()" in told(lambda: handle.disabled().__enter__())
    others = nn.ModuleDict({"model": model, "extra": nn.Linear(2, 2)})
    wrapped = told(lambda: nn.parallel.DistributedDataParallel(others), UnsupportedModelError)
    assert "around extra.weight and 1 more" in wrapped
    assert "colocate the module that holds both" in wrapped
    loss_of(model(**batch)).backward()
    norm = told(lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert "cannot know of those on other ranks" in norm
    present = next(p for p in (*model.image.parameters(), *model.audio.parameters()) if p.grad is not None)
    assert "here and for another part on other ranks" in told(lambda: clip_grad_norm_(present, 1.0))
    assert clip_grad_norm_.__closure__[0].cell_contents is not plain_clip
    handle.remove()
    assert clip_grad_norm_.__closure__[0].cell_contents is plain_clip
    with handle.disabled():
        assert model(**batch)["logits"].shape[1] == 3
    attempts: dict[str, Callable[[Model], object]] = {
        "pad to one length on all ranks": lambda model: loss_of(
            model(**{**batch, "image": batch["image"][:, : 6 - rank]})
        ).item(),
        "other arguments than in the sample's step": lambda model: model.image(input=batch["image"]).sum().item(),
        "is called with str": lambda model: model.image("a photo"),
        "could not be called on rank 0: 'image' is called with other arguments"
        if rank
        else "other arguments": lambda model: (
            model.image(*((batch["image"],) if rank else (batch["image"], 1))).sum().item()
        ),
    }
    for reason, attempt in attempts.items():  # none of these ranks can go on after one
        model = Model()
        handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
        assert reason in told(lambda attempt=attempt, model=model: attempt(model))
        handle.remove()


def not_begun(rank: int) -> None:
    """Plans that ranks cannot run together, and a layer that keeps statistics of a batch, are refused on all ranks."""
    normalized, sample = Model(), batch_of(0, rank, (3, 3))
    normalized.image = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    others = {**MEMBERS, "image": (rank,)}
    other_size = told(lambda: colocated(Model(), sample, MEMBERS, 3), InvalidPlanError)
    assert "the plan is for 3 devices and there are 2 ranks; start 3 ranks, or plan" in other_size
    assert "different plans (rank 0: " in told(lambda: colocated(Model(), sample, others, 2), InvalidPlanError)
    statistics = told(lambda: colocated(normalized, sample, MEMBERS, 2), UnsupportedModelError)
    assert "image.1 is a BatchNorm1d: its statistics would be those of another batch" in statistics


def unfrozen(rank: int) -> None:
    """Parameters that train only since the model was colocated, or do not any more, are named."""
    torch.manual_seed(0)
    model = Model(frozen=("image",))
    handle = colocated(model, batch_of(0, rank, (3, 3)), {**MEMBERS, "image": (0, 1)}, 2)
    model.image.requires_grad_(True)
    assert "image.0.weight and 3 more" in told(lambda: model(**batch_of(0, rank)))
    model.image.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    assert "head.bias trained, or did not" in told(lambda: model(**batch_of(0, rank)))
    handle.remove()
