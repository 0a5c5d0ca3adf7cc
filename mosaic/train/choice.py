"""The plan of a day: tried before its first step, stored, and reused unchanged by every restart.

A trial inside the loop would take steps at several thread counts, and a restart would choose by the clock again.
The trial therefore runs on a model of its own, which is discarded. On several ranks ``colocate`` tries plans itself,
before the loop.
"""

from __future__ import annotations

from collections.abc import Callable
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
from mosaic.train.budget import Budget
from mosaic.train.records import PlanKey, StoredPlan

MAX_TRIAL_STEPS = 600
"""Most steps of a trial, which ends by itself earlier (120 steps, and again if it drifts)."""
MAX_DRIFT = 0.10
"""Change of the step time, as a share, up to which a plan still fits."""
Loss = Callable[[nn.Module, Any], torch.Tensor]


def key_of(
    model: nn.Module, batch: Any, device: torch.device, num_ranks: int, modalities: str, budget: Budget
) -> PlanKey:
    """Returns the key under which a plan for a model, a batch and a device is stored."""
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
        colocate=budget.colocate,
        pipeline=budget.pipeline_settings,
    )


def reason_to_plan(key: PlanKey, before: StoredPlan | None, drift: str) -> str:
    """Returns the reason to plan a day anew; empty if the plan of the day before still fits."""
    if before is None:
        return "this is the first day"
    busy = "" if before.is_measured else "other processes used the CPU when it was measured the day before"
    return key.differences(before.key) or busy or drift


def choose_by_trial(
    model: nn.Module, batch: Any, loss: Loss, key: PlanKey, why: str, exclude: tuple[str, ...] = ()
) -> tuple[StoredPlan, Profile | None]:
    """Tries plans of one rank on a model to discard afterwards; returns the fastest with its profile."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    try:
        handle = mosaic.colocate(model, sample=lambda: loss(model, batch), exclude=exclude)
    except UnsupportedModelError as error:
        return stored(key, why, f"nothing is colocated: {error}"), None
    try:
        for _ in range(MAX_TRIAL_STEPS):
            if not handle.is_trying:
                break
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return stored(key, why, handle.describe(), handle), handle.profile
    finally:
        handle.remove()


def stored(key: PlanKey, why: str, description: str, handle: Handle | None = None) -> StoredPlan:
    """Returns the record of the plan that a handle has chosen; without one, of a day that runs the plain loop."""
    on_ranks, trial_ms = key.num_ranks > 1, dict[str, float]()
    if handle is not None and (on_ranks or handle.active):
        trial_ms = {name: value for name, value in handle.metrics().items() if name.startswith("trial_ms/")}
    times_ms = list(trial_ms.values())
    plain_ms = max(times_ms, default=None) if on_ranks else trial_ms.pop(f"trial_ms/{PLAIN}", None)
    return StoredPlan(
        plan=handle.plan if handle is not None and (on_ranks or handle.active) else None,
        threads=torch.get_num_threads(),
        key=key,
        said=description,
        speedup=plain_ms / min(trial_ms.values()) if plain_ms is not None and len(times_ms) > 1 else None,
        step_ms=None,
        why=why,
        is_measured=handle is None or handle.profile is not None,
    )


def drift_of(before: StoredPlan | None, step_ms: float | None) -> str:
    """Describes how far a day's step time has moved since its plan was new; empty within the limit."""
    if before is None or before.step_ms is None or step_ms is None or abs(step_ms / before.step_ms - 1) <= MAX_DRIFT:
        return ""
    return f"a step took {step_ms:.1f} ms the day before, and {before.step_ms:.1f} ms when the plan was made"
