"""Counting the operators of a user's model, which then needs neither memory for its weights nor a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from mosaic.cli.workload import load_workload, moved
from mosaic.cost.analytic import count_degrees
from mosaic.cost.communication.traffic import ModuleTraffic
from mosaic.engine import find_modules
from mosaic.errors import UnsupportedModelError
from mosaic.graph import ModuleGraph
from mosaic.profiler import traffic_of


def count_workload(
    model: str, degrees: Sequence[int], *, kind: Literal["cuda", "host"]
) -> tuple[ModuleGraph, dict[str, Any]]:
    """Counts as ``count_with_traffic`` does; returns the graph and the counts."""
    return count_with_traffic(model, degrees, kind=kind)[:2]


def count_with_traffic(
    model: str, degrees: Sequence[int], *, kind: Literal["cuda", "host"]
) -> tuple[ModuleGraph, dict[str, Any], dict[str, ModuleTraffic], tuple[str, ...]]:
    """Returns the modules of ``FILE:FACTORY`` and what each does at each degree, as counted on the meta device.

    Args:
        model: The factory; its model and sample are moved to the meta device, where only shapes are left. A model of
            the zoo is made there.
        degrees: Data-parallel degrees; the batch is divided by each.
        kind: Which kind of device the work is for.

    Returns:
        The graph; counts by module; what each module takes and makes; and modules of which that is not known, since
        their arguments share no leading dimension.
    """
    meta = torch.device("meta")
    workload = load_workload(model, device=meta)
    # Over several ranks, what modules share with others is no obstacle.
    several = max(degrees) > 1
    finding = find_modules(_on_meta(workload.model), moved(workload.sample, meta), may_share=several)
    counts = {
        subject.name: count_degrees(
            subject.module, subject.args, subject.kwargs, degrees=tuple(degrees), target=kind, settings=subject.settings
        )
        for subject in finding.subjects
    }
    traffic, unknown = {}, []
    for subject in finding.subjects:
        try:
            traffic[subject.name] = traffic_of(subject)
        except UnsupportedModelError:
            traffic[subject.name] = ModuleTraffic(parameter_gradients=subject.gradient_bytes)
            unknown.append(subject.name)
    return finding.graph, counts, traffic, tuple(unknown)


def _on_meta(model: nn.Module) -> nn.Module:
    """Moves a model to the meta device, where ``Module.to`` gives each module a copy of what several had in common."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((part, name))
    model.to(torch.device("meta"))
    for (first, own), *others in owners.values():
        for part, name in others:
            part._parameters[name] = first._parameters[own]
    return model
