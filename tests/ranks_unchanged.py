"""Loops as people write them, under DistributedDataParallel and colocated over two ranks: all in one start-up."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks_graphs import colocated, difference, twins
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_  # a name of our own, from before any model is colocated

from mosaic.errors import ModuleContractError, MosaicError, UnsupportedModelError

ROWS = (3, 2)
MEMBERS = {"image": (0,), "text": (0, 1), "audio": (1,), "head": (0, 1)}


class Clip(nn.Module):
    """Three towers, a head on what they make, and parameters between them; audio may be missing."""

    def __init__(self, dropout: float = 0.0, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(24, 8))
        self.audio = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        seen, read = self.image(image), self.text(text)
        heard = torch.zeros_like(seen) if audio is None else self.audio(audio)
        return {
            "image": functional.normalize(seen, dim=-1),
            "text": functional.normalize(read, dim=-1),
            "audio": heard,
            "logits": self.head(seen + read + heard),
            "scale": self.logit_scale.exp(),
        }


def batch_of(step: int, rank: int, rows: tuple[int, ...] = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    total, part = sum(rows), slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    return {
        "image": torch.randn(total, 6, generator=generator)[part],
        "text": torch.randint(0, 11, (total, 3), generator=generator)[part],
        "audio": torch.randn(total, 4, generator=generator)[part],
    }


def mean_loss(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"].square().mean() + (out["image"] * out["text"]).sum(-1).mean() * out["scale"]


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # What reaches no rank's loss has gradients of zeros here, and none under DistributedDataParallel: decay tells.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)


Loop = Callable[[nn.Module, int], list[float]]


def compare(loop: Loop, rank: int, **options: Any) -> tuple[float, float]:
    """Runs a loop under both; returns how far losses and parameters are apart."""
    model, wrapped = twins(lambda: Clip(**options), 3)
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    ours, theirs = loop(model, rank), loop(wrapped, rank)
    apart = difference(handle, wrapped)
    handle.remove()
    return max(abs(a - b) / max(1e-3, abs(b)) for a, b in zip(ours, theirs, strict=True)), apart


# Contrastive losses. Each gathers in another way.


def by_distributed_nn(features: torch.Tensor) -> torch.Tensor:
    return torch.cat(torch.distributed.nn.functional.all_gather(features))


def by_own_put_back(features: torch.Tensor) -> torch.Tensor:
    gathered = [torch.empty_like(features) for _ in range(2)]
    dist.all_gather(gathered, features.detach())
    gathered[dist.get_rank()] = features
    return torch.cat(gathered)


def contrastive(gather: Callable[[torch.Tensor], torch.Tensor], *, local: bool) -> Loop:
    def loop(model: nn.Module, rank: int) -> list[float]:
        optimizer, losses = optimizer_for(model), []
        for step in range(8):
            out = model(**batch_of(step, rank, (3, 3)))
            images, texts = gather(out["image"]), gather(out["text"])
            if local:
                pairs = out["image"] @ texts.T, out["text"] @ images.T
                labels = torch.arange(3) + 3 * rank
            else:
                pairs = images @ texts.T, texts @ images.T
                labels = torch.arange(6)
            loss = sum(functional.cross_entropy(out["scale"] * logits, labels) for logits in pairs) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return loop


def whole_batch_gradients(rank: int) -> float:
    """Gathering with gradients gives the gradients of the loss over the whole batch; returns how far they are off."""
    model, wrapped = twins(Clip, 5)
    plain = wrapped.module
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)

    def loss_of(images: torch.Tensor, texts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scale * images @ texts.T, torch.arange(6))

    out = model(**batch_of(0, rank, (3, 3)))
    loss_of(by_distributed_nn(out["image"]), by_distributed_nn(out["text"]), out["scale"]).backward()
    whole = plain(**{key: torch.cat([batch_of(0, r, (3, 3))[key] for r in range(2)]) for key in batch_of(0, 0)})
    loss_of(whole["image"], whole["text"], whole["scale"]).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    off = [
        (parameter.grad - wanted[name]).abs().max().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and wanted[name] is not None
    ]
    handle.remove()
    assert len(off) >= 4
    return max(off)


# Loops.


def autocast(model: nn.Module, rank: int) -> list[float]:
    optimizer, losses = optimizer_for(model), []
    for step in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch_of(step, rank))
        loss = mean_loss({key: value.float() for key, value in out.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scaled(model: nn.Module, rank: int) -> list[float]:
    """At two steps one rank's towers get infinite gradients, and others' do not: all skip, and scale down."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(8):
        out = model(**batch_of(step, rank))
        loss = mean_loss(out)
        if step in (2, 5):
            loss = loss + out["audio" if step == 2 else "image"].sum() * (math.inf if rank == 0 else 0.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(scaler.get_scale())
    assert losses[2] < losses[1], losses
    return losses


def accumulated(model: nn.Module, rank: int) -> list[float]:
    """Three micro-batches a step, one of them without audio on one rank; norms of several orders."""
    optimizer, losses = optimizer_for(model), []
    for step in range(6):
        for micro in range(3):
            batch = batch_of(10 * step + micro, rank)
            if micro == 1 and rank == 0:
                del batch["audio"]
            loss = mean_loss(model(**batch)) / 3
            loss.backward()
            losses.append(loss.item())
        losses.append(float(clip_grad_norm_(model.parameters(), 0.1, norm_type=(2.0, math.inf, 1.0)[step % 3])))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def evaluated(model: nn.Module, rank: int) -> list[float]:
    """Evaluates between steps; what dropout draws in training belongs to no promise, so that it does not train."""
    losses = []
    for step in range(3):
        model.eval()
        with torch.no_grad():
            losses.append(mean_loss(model(**batch_of(step, rank))).item())
        with torch.inference_mode():
            losses.append(mean_loss(model(**batch_of(step, rank))).item())
        model.train()
        assert math.isfinite(mean_loss(model(**batch_of(step, rank))).item())
    return losses


def empty(model: nn.Module, rank: int) -> list[float]:
    """A rank without rows takes part in everything."""
    optimizer, losses = optimizer_for(model), []
    for step in range(4):
        out = model(**batch_of(step, rank, ((4, 0) if step % 2 else (0, 3))))
        loss = out["logits"].square().sum() + out["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen_traffic(rank: int) -> dict[str, float]:
    """Returns what one step sends where the image tower is frozen and the text tower trains in its last layer only."""
    torch.manual_seed(0)
    model = Clip(frozen=("image", "text.0"))
    handle = colocated(model, batch_of(0, rank, (3, 3)), {**MEMBERS, "image": (0, 1), "audio": (0, 1)}, 2)
    model(**batch_of(1, rank, (1, 5)))["logits"].square().mean().backward()
    sent = {key: value for key, value in handle.metrics().items() if key.startswith("sent_bytes")}
    assert model.image[0].weight.grad is None
    assert model.text[0].weight.grad is None
    assert model.text[2].weight.grad is not None
    handle.remove()
    return sent


def loaded(rank: int) -> tuple[float, float, list[int]]:
    """Returns the bytes that a step sends with equal slices, and with those of the handle's sampler, and these."""
    torch.manual_seed(0)
    model = Clip()
    members = dict.fromkeys(MEMBERS, (0,))
    handle = colocated(model, batch_of(0, rank, (3, 3)), members, 2)
    whole = {key: torch.cat([batch_of(1, r, (3, 3))[key] for r in range(2)]) for key in batch_of(1, 0)}
    sent = []
    sampler = handle.sampler(6, 6)
    for rows in (list(range(3 * rank, 3 * rank + 3)), next(iter(sampler))):
        handle.clear_timeline()
        mean_loss(model(**{key: tensor[rows] for key, tensor in whole.items()})).backward()
        mine = sum(value for key, value in handle.metrics().items() if key.startswith("sent_bytes"))
        everyones = torch.tensor(mine)
        dist.all_reduce(everyones)
        sent.append(everyones.item())
    handle.remove()
    return sent[0], sent[1], list(sampler.shares)


def averaged(rank: int) -> float:
    """An average of the weights, kept in a deep copy as loops do; returns how far it is from the plain one."""
    model, wrapped = twins(Clip, 7)
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    copies = copy.deepcopy(model), copy.deepcopy(wrapped.module)
    for trained, average in zip((model, wrapped), copies, strict=True):
        optimizer = optimizer_for(trained)
        for step in range(3):
            mean_loss(trained(**batch_of(step, rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for ours, theirs in zip(average.parameters(), trained.parameters(), strict=True):
                    ours.lerp_(theirs, 0.5)
    found, wanted = handle.full_state_dict(copies[0]), copies[1].state_dict()
    handle.remove()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


# What is told.


def told(attempt: Callable[[], object], kind: type[Exception] = ModuleContractError) -> str:
    try:
        attempt()
    except kind as error:
        return str(error)
    return "nothing"


def refusals(rank: int) -> dict[str, str]:
    """What cannot be done while the model is colocated; each ends on both ranks."""
    torch.manual_seed(0)
    model = Clip()
    plain_clip = clip_grad_norm_.__closure__[0].cell_contents
    handle = colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, 2)
    batch = batch_of(0, rank)
    missing = model.image if rank else model.audio
    said = {
        "copy": told(lambda: copy.deepcopy(missing)(torch.randn(2, 6 if rank else 4))),
        "part": told(lambda: missing[0](torch.randn(2, 6 if rank else 4))),
        "disabled": told(lambda: handle.disabled().__enter__()),
        "wrapped": told(lambda: nn.parallel.DistributedDataParallel(model), UnsupportedModelError),
    }
    mean_loss(model(**batch)).backward()
    said["norm"] = told(lambda: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert clip_grad_norm_.__closure__[0].cell_contents is not plain_clip
    handle.remove()
    assert clip_grad_norm_.__closure__[0].cell_contents is plain_clip
    assert not hasattr(torch.amp.GradScaler._unscale_grads_, "_mosaic_instead")
    with handle.disabled():
        said["whole"] = str(tuple(model(**batch)["logits"].shape))
    attempts: dict[str, Callable[[Clip], object]] = {
        "padding": lambda model: mean_loss(model(**{**batch, "text": batch["text"][:, : 3 - rank]})).item(),
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


class Mixing(nn.Module):
    """Its rows depend on each other, or it has none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.part = _Centred(how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).sum()


class _Centred(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        if self.how == "mean":
            return x - x.mean(0)
        return x.sum(0) if self.how == "sum" else x.square().mean()


def unsplittable(rank: int) -> list[str]:
    sample = torch.randn(4, 4)
    return [
        told(lambda how=how: colocated(Mixing(how), sample, {"part": (0,)}, 2), UnsupportedModelError)
        for how in ("mean", "sum", "scalar")
    ]


def everything(rank: int, size: int) -> dict[str, Any]:
    """Runs all of it; returns what each came to, by name."""
    del size
    return {
        "all_gather with gradients": compare(contrastive(by_distributed_nn, local=False), rank),
        "all_gather with gradients, local loss": compare(contrastive(by_distributed_nn, local=True), rank),
        "own put back": compare(contrastive(by_own_put_back, local=False), rank),
        "own put back, local loss": compare(contrastive(by_own_put_back, local=True), rank),
        "whole batch": whole_batch_gradients(rank),
        # "autocast": compare(autocast, rank),
        "scaled": compare(scaled, rank),
        "accumulated": compare(accumulated, rank),
        "frozen": compare(accumulated, rank, frozen=("image", "text.0")),
        "evaluated": compare(evaluated, rank, dropout=0.5),
        "empty": compare(empty, rank),
        "frozen traffic": frozen_traffic(rank),
        "loaded": loaded(rank),
        "averaged": averaged(rank),
        "refusals": refusals(rank),
        "unsplittable": unsplittable(rank),
        "unfrozen": unfrozen(rank),
    }


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


def uneven(rank: int, size: int) -> tuple[str, float]:
    """One rank leaves a backward out, as loops do with a loss that is not finite; returns what each rank is told."""
    torch.manual_seed(0)
    model = Clip()
    colocated(model, batch_of(0, rank, (3, 3)), MEMBERS, size, timeout_s=3.0)
    start = time.monotonic()
    try:
        for step in range(4):
            loss = mean_loss(model(**batch_of(step, rank)))
            if rank == 0 or step != 1:
                loss.backward()
    except MosaicError as error:
        return str(error), time.monotonic() - start
    return "nothing", time.monotonic() - start
