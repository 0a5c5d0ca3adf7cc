"""Counts the operators of a user's model on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mosaic.cli.workload import ZOO, load_workload, mean_square, moved
from mosaic.cost.communication import ModuleTraffic
from mosaic.cost.counting import CudaFunctions, LayerCounts, count_degrees
from mosaic.cost.counts import ModuleCounts, main_dtype
from mosaic.cost.precision import PRECISIONS, Dtype, usual_dtype
from mosaic.engine import find_modules
from mosaic.engine.finding.find import runner_of
from mosaic.errors import MosaicError, UnsupportedModelError
from mosaic.graph import ModuleGraph
from mosaic.profiler import Subject, traffic_of

if TYPE_CHECKING:
    from mosaic.pipelining.layers import CountedMicrobatch, PipelineModel
    from mosaic.pipelining.rank_hardware import RankHardware
    from mosaic.pipelining.rank_layer import ContextSharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of a workload's modules at each degree."""

    graph: ModuleGraph
    counts: Mapping[str, Mapping[int, ModuleCounts]]
    """By module and data-parallel degree."""
    traffic: Mapping[str, ModuleTraffic]
    """Bytes of each module's inputs and outputs."""
    unknown: tuple[str, ...]
    """Modules whose traffic is unknown."""
    dtype: str
    """Number format of most operations, such as ``bfloat16``."""
    description: str
    """Operations in that format."""


def count_workload(
    model: str, degrees: Sequence[int], *, kind: Literal["cuda", "host"], dtype: Dtype | None = None
) -> Counted:
    """Counts the modules of a model on the meta device, which keeps only shapes.

    Args:
        model: ``FILE:FACTORY`` or a model of the zoo.
        degrees: Data-parallel degrees; the batch is divided by each.
        kind: Kind of device.
        dtype: Name in ``PRECISIONS``; by default that of the factory's model, or for the zoo's
            usual on the device.
    """
    if dtype is None and model.startswith(ZOO):
        dtype = usual_dtype(kind)
    meta = torch.device("meta")
    workload = load_workload(model, device=meta)
    meta_model, sample = _on_meta(workload.model), moved(workload.sample, meta)
    if dtype is not None:
        meta_model = meta_model.float()
        sample = pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, sample)
    low = torch.bfloat16 if dtype == "bfloat16" else None
    # Over several ranks, modules may share parameters.
    call, may_share = runner_of(meta_model, sample), max(degrees) > 1

    def run_low() -> Any:
        with CudaFunctions(low):
            return call()

    run = sample if low is None else run_low
    finding = find_modules(meta_model, run, include=workload.modules, may_share=may_share)
    counts, traffic, unknown = {}, {}, []
    layers: LayerCounts = {}
    for subject in finding.subjects:
        counts[subject.name] = count_degrees(
            subject.module,
            subject.args,
            subject.kwargs,
            degrees=tuple(degrees),
            target=kind,
            settings=subject.settings,
            autocast=low,
            layers=layers,
        )
        try:
            traffic[subject.name] = _traffic_of(subject, workload.batch, counts[subject.name][1])
        except UnsupportedModelError:
            traffic[subject.name] = ModuleTraffic(parameter_gradients=subject.gradient_bytes)
            unknown.append(subject.name)
    main_format = main_dtype(by_degree[min(by_degree)] for by_degree in counts.values())
    return Counted(
        graph=finding.graph,
        counts=counts,
        traffic=traffic,
        unknown=tuple(unknown),
        dtype=main_format,
        description=PRECISIONS[dtype] if dtype is not None else "the format of most of the model's operations",
    )


def count_layers(
    where: str, machine: RankHardware, sharing: ContextSharing
) -> tuple[PipelineModel, list[CountedMicrobatch]]:
    """Counts the layers of a model for a pipeline. Its sample is one microbatch (of one row for the zoo by default).

    A factory may return a list of microbatches, of which the first has every modality.

    Raises:
        MosaicError: A microbatch is not a dict of keywords.
        UnsplittableError: The model cannot be cut between layers.
    """
    from mosaic.parts.finding.find import find_split  # 0.25 s to import
    from mosaic.ranks.pipeline.counting import count_model

    if where.startswith(ZOO):
        where = where if where.count(":") > 1 else f"{where}:1"
        workload = load_workload(where, device=torch.device("meta"), sample_device=torch.device("cpu"))
    else:
        workload = load_workload(where)
    samples = workload.sample if isinstance(workload.sample, list) else [workload.sample]
    if wrong := [type(sample).__name__ for sample in samples if not isinstance(sample, dict)] or not samples:
        raise MosaicError(f"{where} returned samples {wrong}; for a pipeline return dicts of keywords")
    loss = _own_loss if workload.loss is mean_square else workload.loss
    split = find_split(workload.model, samples[0], loss=loss)
    counted = count_model(workload.model, split, samples[0], machine, sharing)
    return counted.model, [counted.microbatch(sample) for sample in samples]


def _own_loss(output: Any) -> Any:
    """Returns the loss in a model's output, the default of pipelines; the whole output if it has none."""
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def _traffic_of(subject: Subject, batch: int | None, counted: ModuleCounts) -> ModuleTraffic:
    if not counted.result_bytes:
        raise UnsupportedModelError(f"{subject.name} returns objects whose tensors cannot be counted")
    results = (counted.result_bytes, counted.result_gradient_bytes)
    try:
        return traffic_of(subject, results=results)
    except UnsupportedModelError:  # such as a mask with more rows than the batch
        if batch is None:
            raise
        return traffic_of(subject, batch=batch, results=results)


def _on_meta(model: nn.Module) -> nn.Module:
    """Moves a model to the meta device and ties shared parameters again; ``Module.to`` copies them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to(torch.device("meta"))
    for first, *others in names.values():
        for name in others:
            module, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(module), own_name, model.get_parameter(first))
    return model
