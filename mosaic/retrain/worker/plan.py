"""The plan of a day: tried before its first step, stored, and reused unchanged by every restart.

A trial inside the loop would take steps at several thread counts, and a restart would choose by the clock again.
The trial therefore runs on a model of its own, which is discarded. On several ranks ``colocate`` tries plans itself,
before the loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import mosaic
from mosaic.artifact import fingerprint, load, save
from mosaic.engine import Handle
from mosaic.errors import UnsupportedModelError
from mosaic.retrain.data_check import DayFigures
from mosaic.retrain.folder import load_if_intact
from mosaic.retrain.records import PlanKey, StoredPlan, Trained, differences
from mosaic.retrain.worker.group import WorkerGroup
from mosaic.retrain.worker.work import Work
from mosaic.take_turns import PLAIN

MAX_TRIAL_STEPS = 600
"""Most steps of a trial, which ends by itself earlier (120 steps, and again if it drifts)."""
MAX_DRIFT = 0.10
"""Change of the step time, as a share, up to which a plan still fits."""


def key_of(work: Work, group: WorkerGroup, model: nn.Module, batch: Any) -> PlanKey:
    """Returns the key under which a plan for a model, a batch and a device is stored."""
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    leaves = [
        [pytree.keystr(path), list(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__]
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
    ]
    is_cuda = group.device.type == "cuda"
    return PlanKey(
        model=fingerprint(parameters),
        batch=fingerprint(leaves),
        modalities=", ".join(sorted(load(DayFigures, work.day.figures).modalities)) or "none",
        device=torch.cuda.get_device_name(group.device) if is_cuda else f"cpu, {torch.get_num_threads()} threads",
        num_ranks=group.size,
        torch=torch.__version__,
        colocate=work.budget.colocate,
        pipeline=work.budget.pipeline_settings,
    )


def stored_plan(work: Work, key: PlanKey) -> tuple[StoredPlan | None, str, str]:
    """Returns the plan that fits: that of an earlier start, or of the day before.

    Returns:
        The plan, or None; the reason to plan anew; and the change of the key within the day, empty for none.
    """
    current = load_if_intact(StoredPlan, work.day.plan)
    if current is not None:
        change = differences(key, current.key)
        return (None if change else current), change, change
    days = [day for day in work.folder.days() if day.plan.is_file() and day.path.name < work.day.state.day]
    before = load_if_intact(StoredPlan, days[-1].plan) if days else None
    if before is None:
        return None, "this is the first day", ""
    why = differences(key, before.key)
    if not before.is_measured:
        why = why or "other processes used the CPU when it was measured the day before"
    last = load_if_intact(Trained, days[-1].trained)
    step_ms, reference_ms = last.step_ms if last is not None else None, before.step_ms
    if step_ms is not None and reference_ms is not None and abs(step_ms / reference_ms - 1) > MAX_DRIFT:
        why = why or f"a step took {step_ms:.1f} ms the day before, and {reference_ms:.1f} ms when the plan was made"
    return (None if why else before), why, ""


def choose_by_trial(work: Work, model: nn.Module, batch: Any, key: PlanKey, why: str) -> StoredPlan:
    """Tries plans of one rank on a model to discard afterwards; returns the fastest, and writes ``profile.json``."""
    loss, exclude = work.program.loss, work.budget.exclude
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    try:
        handle = mosaic.colocate(model, sample=lambda: loss(model, batch), exclude=exclude)
    except UnsupportedModelError as error:
        return stored(key, why, f"nothing is colocated: {error}")
    try:
        for _ in range(MAX_TRIAL_STEPS):
            if not handle.is_trying:
                break
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle.profile is not None:
            save(handle.profile, work.day.profile)
        return stored(key, why, handle.describe(), handle)
    finally:
        handle.remove()


def stored(key: PlanKey, why: str, description: str, handle: Handle | None = None) -> StoredPlan:
    """Returns the record of the plan that a handle has chosen; without one, of a day that runs the plain loop."""
    on_ranks, trial_ms = key.num_ranks > 1, dict[str, float]()
    is_placed = handle is not None and (on_ranks or handle.active)
    if handle is not None and is_placed:
        trial_ms = {name: value for name, value in handle.metrics().items() if name.startswith("trial_ms/")}
    times_ms = list(trial_ms.values())
    plain_ms = max(times_ms, default=None) if on_ranks else trial_ms.pop(f"trial_ms/{PLAIN}", None)
    return StoredPlan(
        plan=handle.plan if handle is not None and is_placed else None,
        threads=torch.get_num_threads(),
        key=key,
        description=description,
        speedup=plain_ms / min(trial_ms.values()) if plain_ms is not None and len(times_ms) > 1 else None,
        why=why,
        is_measured=handle is None or handle.profile is not None,
    )
