"""``mosaic plan --pipeline``: plans a pipeline's step for described devices; needs no GPU."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mosaic.artifact import read, save, write_text
from mosaic.cli.context import mask_function
from mosaic.cli.options import Json, console_beside, write_json
from mosaic.context import CONTEXT_METHODS
from mosaic.errors import unknown
from mosaic.hardware import find_cluster
from mosaic.pipelining.baselines import BASELINES
from mosaic.pipelining.cuts import PARTITION_METHODS
from mosaic.pipelining.layers import CountedMicrobatch
from mosaic.pipelining.orders import DEFAULT_METHOD, METHODS, OrderLimits
from mosaic.pipelining.partition import Request
from mosaic.pipelining.planner import PlannerOptions, contend, plan_step
from mosaic.pipelining.rank_hardware import Degrees, RankHardware
from mosaic.pipelining.rank_layer import ContextSharing
from mosaic.pipelining.task_graph import RankSpace, gradient_sums_ms
from mosaic.pipelining.torch_csv import baseline_of_csv, to_torch_csv
from mosaic.report.pipeline_picture import PipelineRun, draw_pipelines, pipeline_table

_PARTITIONS = ("auto", *PARTITION_METHODS)
_BASELINES = arg(
    metavar="NAME",
    help=f"Baselines to compare with: {', '.join(BASELINES)}, or a .csv file of torch's; --baselines alone: none.",
)


@dataclass(frozen=True, kw_only=True)
class PipelineCommand:
    """Plan a step of a pipeline: the layers of each rank, the schedule, and the activation policies.

    Layers of a torch model are counted. All times are simulated from counted operators of a described device.
    """

    pipeline: int
    """Number of pipeline ranks."""
    tensor: int = 1
    """Number of devices that share each matrix."""
    context: int = 1
    """Number of devices that share each sequence."""
    mask: Annotated[str | None, arg(metavar="causal|FILE:FUNCTION")] = None
    """The mask of the backbone's sequences, as for `mosaic plan --context`; by default the model's."""
    share: Annotated[str, arg(help=f"Load balancer of a sequence's blocks: {', '.join(CONTEXT_METHODS)}.")] = "lpt"
    data: int = 1
    """Number of data-parallel copies of the pipeline."""
    model: Annotated[str, arg(metavar="zoo:NAME-SIZE[:BATCH]|FILE:FACTORY")] = "zoo:qwen3-vl-paper"
    """A model of the zoo, by default with a batch of 1, or a function that returns a model and microbatches."""
    device: str = "h100-80g"
    """A described device, by name or file."""
    microbatches: int = 16
    """Number of microbatches of the step, unless FILE:FACTORY returns a list."""
    seed: int = 0
    """Seed of the search."""
    partition: Annotated[str, arg(help=f"Partition of layers: {', '.join(_PARTITIONS)}.")] = PlannerOptions().partition
    method: Annotated[str, arg(help=f"Search method for the order of tasks: {', '.join(METHODS)}.")] = DEFAULT_METHOD
    seconds: float = 5.0
    """Limit of the search in counted work, about seconds on an idle core; at most ten times as long on the clock."""
    threads: int = 1
    """Number of threads of the search."""
    memory_gb: float | None = None
    """Memory of each device; by default from its description."""
    baselines: Annotated[tuple[str, ...], _BASELINES] = ("1f1b", "megatron", "zb-v")
    output: Path = Path("schedule.json")
    """File of the schedule; a .csv has torch's form, for torchtitan's pipeline_parallel_schedule_csv."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also draw the step below the fastest baseline, as .png or .svg."""
    json: Json = None

    def execute(self) -> None:
        for kind, name, table in (("method", self.method, METHODS), ("partition", self.partition, _PARTITIONS)):
            if name not in table:
                raise ValueError(unknown(kind, name, table))
        limits = OrderLimits(effort=self.seconds, seconds=10 * self.seconds, threads=self.threads, seed=self.seed)
        options = PlannerOptions(partition=self.partition, method=self.method, limits=limits)
        tables = [name for name in self.baselines if name.endswith(".csv")]
        files = {name: baseline_of_csv(name, read(Path(name)).decode()) for name in tables}
        request, microbatches, machine, space = self._job()
        contenders = contend(request, microbatches, space=space, names=self.baselines, table={**BASELINES, **files})
        planned = plan_step(request, microbatches, space=space, options=options, contenders=contenders)
        if self.output.suffix == ".csv":
            write_text(to_torch_csv(planned.schedule()), self.output)
        else:
            save(planned.schedule(), self.output)
        console = console_beside(self.json)
        console.print(pipeline_table(planned, contenders))
        reasons = {name: plan for name, plan in contenders.items() if isinstance(plan, str)}
        plans = {"planned": planned} | {name: plan for name, plan in contenders.items() if not isinstance(plan, str)}
        times_ms = {name: plan.makespan_ns / 1e6 for name, plan in plans.items()}
        rows = [
            {"schedule": name, "simulated_ms": times_ms.get(name), "reason": reasons.get(name, "")}
            for name in ("planned", *contenders)
        ]
        write_json(json.dumps({"bound_ms": planned.bound_ns / 1e6, "rows": rows}, indent=2) + "\n", self.json)
        sums = ""
        if (copies := self.data * self.context) > 1:
            sums_ms = gradient_sums_ms(machine, request.model, planned.partition)
            sums = f", followed by {sums_ms:.1f} ms of gradient reduction over {copies} ranks"
        console.print(
            f"{planned.origin}: {len(planned.graph.tasks)} tasks; at most {planned.gap:.1%} longer than the best of "
            f"this partition (bound {planned.bound_ns / 1e6:.1f} ms){sums}; all times are simulated; "
            f"wrote {self.output}",
            highlight=False,
        )
        if self.picture is not None:
            fastest = sorted(plans.keys() - {"planned"}, key=lambda name: (times_ms[name], name))[:1]
            shown = ((name, plans[name]) for name in (*fastest, "planned"))
            runs = [PipelineRun(title=name, graph=plan.graph, start_ns=plan.timed.start_ns) for name, plan in shown]
            draw_pipelines(runs, self.picture)

    def _job(self) -> tuple[Request, list[CountedMicrobatch], RankHardware, RankSpace]:
        from mosaic.cli.counting import count_layers  # loads torch

        if not 1 <= self.microbatches <= 4096:
            raise ValueError(f"microbatches={self.microbatches}; use 1 to 4096")
        if self.memory_gb is not None and not 0 < self.memory_gb < math.inf:
            raise ValueError(f"memory_gb={self.memory_gb}; use a number above 0")
        degrees = Degrees(tensor=self.tensor, pipeline=self.pipeline, data=self.data, context=self.context)
        count = degrees.num_devices
        cluster = find_cluster(self.device, count if count <= 8 else -(-count // 8) * 8)
        machine = RankHardware(cluster=cluster, degrees=degrees)
        mask = None if self.mask is None else mask_function(self.mask)
        model, step = count_layers(self.model, machine, ContextSharing(mask=mask, method=self.share))
        microbatches = step if len(step) > 1 else step * self.microbatches
        limit = round(self.memory_gb * 1e9) if self.memory_gb is not None else cluster.hardware.memory_bytes
        space = RankSpace(network=cluster, devices_per_rank=degrees.tensor * degrees.context, limit_bytes=limit)
        request = Request(model=model, num_ranks=self.pipeline, microbatches=microbatches)
        return request, microbatches, machine, space
