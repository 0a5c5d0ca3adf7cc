"""Steps of the papers' models: what is planned in every part of the study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bench.papers.baselines import PAPER_BASELINES
from bench.papers.data_sets import IMAGE_MIXTURE, VIDEO_MIXTURE
from bench.papers.generators import Microbatch, draw_step
from bench.papers.pipeline_layers import LayerStack
from bench.papers.pipeline_models import KnownModel, find_known_model
from bench.record import Figure, missing_figure
from mosaic.hardware import Cluster
from mosaic.pipelining.layers import PipelineModel
from mosaic.pipelining.orders import OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import Contender, PlannedStep, PlannerOptions, contend, plan_step
from mosaic.pipelining.task_graph import RankSpace

STEPS_FOR_PARTITION = 4
"""Steps of other seeds that stand for those to come when a partition is made: none sees the step that it runs."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model of a paper on the devices that it had there."""

    name: str
    """Of ``KNOWN_MODELS``."""
    num_microbatches: int = 16
    """Of a step."""
    with_memory: bool = True
    """True if ranks have the devices' memory; False: unlimited memory."""

    @cached_property
    def known(self) -> KnownModel:
        """Its row of the table."""
        return find_known_model(self.name)

    @cached_property
    def cluster(self) -> Cluster:
        """Its devices."""
        return self.known.cluster()

    @cached_property
    def model(self) -> PipelineModel:
        """Its modules."""
        return self.known.model(cluster=self.cluster)

    @property
    def space(self) -> RankSpace:
        """Its ranks."""
        degrees = self.known.degrees
        return RankSpace(
            network=self.cluster,
            devices_per_rank=degrees.tensor * degrees.context,
            limit_bytes=self.cluster.hardware.memory_bytes if self.with_memory else 0,
        )

    def step(self, seed: int) -> tuple[Microbatch, ...]:
        """Returns a step's microbatches."""
        if self.known.is_frozen:
            return (self.known.microbatch(),) * self.num_microbatches
        mixture = VIDEO_MIXTURE if self.known.video else IMAGE_MIXTURE
        return draw_step(mixture, num_microbatches=self.num_microbatches, seed=seed)

    @cached_property
    def request(self) -> Request:
        """Request for partitions, made for other steps than those that run."""
        seen = [one for seed in range(STEPS_FOR_PARTITION) for one in self.step(10_000 + seed)]
        return Request(model=self.model, num_ranks=self.known.degrees.pipeline, microbatches=seen)

    def plan(self, step: Sequence[Microbatch], options: PlannerOptions) -> PlannedStep:
        """Plans a step."""
        return plan_step(self.request, step, space=self.space, options=options)

    def contend(self, step: Sequence[Microbatch], names: Sequence[str]) -> tuple[Contender, ...]:
        """Simulates baselines."""
        return contend(
            replace(self.request, chunks_per_rank=2), step, space=self.space, names=names, table=PAPER_BASELINES
        )

    def mfu(self, step: Sequence[Microbatch], step_ns: float) -> float:
        """Returns the model's operations over the peak of the pipeline's devices in that time: no recomputation."""
        flops = sum(
            3 * module.forward_flops(one, units)
            for module in self.model.modules
            for one in step
            if isinstance(module, LayerStack) and (units := module.units(one))
        )
        degrees = self.known.degrees
        devices = degrees.tensor * degrees.pipeline * degrees.context
        return flops / (devices * self.cluster.hardware.bf16_tflops * 1e12 * step_ns / 1e9)


def options(seconds: float) -> PlannerOptions:
    """Returns options as PipeWeaver plans, with a limit of wall time on one thread."""
    return PlannerOptions(partition="separated", limits=OrderLimits(effort=seconds))


def own_options(seconds: float) -> PlannerOptions:
    """Returns options without PipeWeaver's choices: any partition."""
    return PlannerOptions(limits=OrderLimits(effort=seconds))


def simulated(name: str, values: Sequence[float]) -> Figure:
    """Returns the mean of several steps, each a sample."""
    return Figure(name=name, source="simulated", value=sum(values) / len(values), samples=tuple(values))


def ratios(
    of: str, plans: Sequence[PlannedStep], others: Sequence[Sequence[Contender]], *, what: str
) -> Iterator[Figure]:
    """Gives each baseline's step over the planned one's, of the same steps; one that cannot run has its reason."""
    for contenders in zip(*others, strict=True):
        name = f"{of}: {contenders[0].name}: {what}, ratio"
        reason = next((one.reason for one in contenders if one.makespan_ns is None), None)
        if reason is not None:
            yield missing_figure(name, reason, source="simulated")
            continue
        pairs = zip(contenders, plans, strict=True)
        yield simulated(name, [(one.makespan_ns or 0) / plan.makespan_ns for one, plan in pairs])
