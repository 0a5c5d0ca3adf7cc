"""The plan of a day: chosen and tried before its first step, stored, and run as it is by every restart.

A trial inside of the loop would take its steps at several thread counts, and a restart would decide by the clock anew;
so plans are tried on a model of their own, which is thrown away, and no step of it trains the real one. On several
ranks ``colocate`` tries plans before the loop by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import mosaic
from mosaic.artifact import fingerprint
from mosaic.engine import Handle
from mosaic.errors import UnsupportedModelError
from mosaic.profile import Profile
from mosaic.take_turns import PLAIN
from mosaic.train.pipelined import PipelinedModel
from mosaic.train.records import PlanKey, StoredPlan

MAX_TRIAL_STEPS = 600
"""Steps after which a trial that has not ended is left; it is bounded by itself (120 steps, and again if it drifts)."""

Loss = Callable[[nn.Module, Any], torch.Tensor]


def key_of(
    model: nn.Module,
    batch: Any,
    device: torch.device,
    num_ranks: int,
    modalities: str,
    *,
    colocate: bool,
    pipeline: str = "",
) -> PlanKey:
    """Returns what a plan for a model, a batch and a device would be made for."""
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    leaves = [
        [pytree.keystr(path), list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__]
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
    ]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return PlanKey(
        model=fingerprint(parameters),
        batch=fingerprint(leaves),
        modalities=modalities,
        device=name,
        num_ranks=num_ranks,
        torch=torch.__version__,
        colocate=colocate,
        pipeline=pipeline,
    )


def reason_to_plan(key: PlanKey, before: StoredPlan | None, drift: str) -> str:
    """Returns why a day has to be planned anew; empty where the plan of the day before runs on."""
    if before is None:
        return "this is the first day"
    busy = "" if before.is_measured else "other processes used the CPU when it was measured the day before"
    return key.differences(before.key) or busy or drift


def choose_by_trial(
    model: nn.Module, batch: Any, loss: Loss, key: PlanKey, why: str, exclude: tuple[str, ...] = ()
) -> tuple[StoredPlan, Profile | None]:
    """Chooses what runs on one rank; returns it, and the profile that it was made from.

    Args:
        model: One to be thrown away, on the device where it will train.
        batch: The first one.
        loss: Runs the model on a batch.
        key: What the plan is for.
        why: Why it is made.
        exclude: Names or patterns of modules that are left where they are called.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)

    def step() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        handle = mosaic.colocate(model, sample=lambda: loss(model, batch), exclude=exclude)
    except UnsupportedModelError as error:
        return plain(key, why, f"nothing is colocated: {error}"), None
    try:
        for _ in range(MAX_TRIAL_STEPS):
            if not handle.is_trying:
                break
            step()
        return _stored(handle, key, why), handle.profile
    finally:
        handle.remove()


def plain(key: PlanKey, why: str, said: str) -> StoredPlan:
    """Returns what is stored where the plain loop runs."""
    return StoredPlan(
        plan=None,
        threads=torch.get_num_threads(),
        key=key,
        said=said,
        speedup=None,
        step_ms=None,
        why=why,
        is_measured=True,
    )


def _stored(handle: Handle, key: PlanKey, why: str) -> StoredPlan:
    tried = {name: value for name, value in handle.metrics().items() if name.startswith("trial_ms/")}
    plain = tried.pop(f"trial_ms/{PLAIN}", None)
    speedup = plain / min(tried.values()) if plain is not None and tried and handle.active else None
    return StoredPlan(
        plan=handle.plan if handle.active else None,
        threads=torch.get_num_threads(),
        key=key,
        said=handle.describe(),
        speedup=speedup,
        step_ms=None,
        why=why,
        is_measured=handle.profile is not None,
    )


def stored_of_ranks(handle: Handle, key: PlanKey, why: str) -> StoredPlan:
    """Returns what several ranks run, once ``colocate`` has chosen it."""
    tried = [value for name, value in handle.metrics().items() if name.startswith("trial_ms/")]
    return StoredPlan(
        plan=handle.plan,
        threads=torch.get_num_threads(),
        key=key,
        said=handle.describe(),
        speedup=max(tried) / min(tried) if len(tried) > 1 else None,
        step_ms=None,
        why=why,
        is_measured=handle.profile is not None,
    )


def stored_of_pipeline(model: PipelinedModel, key: PlanKey, why: str) -> StoredPlan:
    """Returns what the ranks of a pipeline run, once it was tried."""
    return replace(plain(key, why, model.describe()), pipeline=model.way)


def drift_of(before: StoredPlan | None, step_ms: float | None, *, limit: float = 0.10) -> str:
    """Says by how much a day's steps were slower or faster than when its plan was new; empty within the limit."""
    if before is None or before.step_ms is None or step_ms is None:
        return ""
    change = step_ms / before.step_ms - 1
    if abs(change) <= limit:
        return ""
    return f"a step took {step_ms:.1f} ms the day before, and {before.step_ms:.1f} ms when the plan was made"
