"""Memory of ranks in a step, beside what was simulated.

Measured: what parameters, gradients and AdamW's state of the rank take before the step, and above it the most that
torch's CPU allocator has given out at one time while the step runs, as torch's profiler is told of every allocation.
What libraries below torch allocate for themselves is in neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from bench.pipeline.measured.judged import judge
from bench.pipeline.measured.models import MODELS
from bench.pipeline.measured.steps import Sizes, fitted
from bench.record import Figure, missing_figure
from mosaic.pipelining.plan import StepPlanner
from mosaic.ranks.pipeline.setup import PLANNED

MB = 1e6


def memory(rank: int, size: int, *, name: str, sizes: Sizes) -> Iterator[Figure]:
    """The fullest rank in the plan's step, and each rank's simulated over measured."""
    model, of = MODELS[name], f"{name}, {size} ranks: {PLANNED}"
    own = fitted(model, sizes)
    world = own.world
    planner = own.make(PLANNED)
    if not isinstance(planner, StepPlanner):
        yield missing_figure(f"{of}: memory of the fullest rank, MB", planner)
        return
    runner = own.runner(planner.plan, keeps_all=False)
    step = model.step(1, sizes.microbatches)
    judged = judge(own, planner, step, seconds=sizes.plan_s)
    trained = [one for one in own.model.parameters() if not one.is_meta and one.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def run() -> None:
        runner.run(judged.shared, step, shapes=own.shapes(step))

    for _ in range(2):  # gradients and the optimizer's state are there, and programs are known
        run()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    mine = held_bytes(own.model, optimizer) + peak_bytes(run)
    measured = [json.loads(text) for text in world.all_gather(json.dumps(mine))]
    shares = [100 * (theirs / ours - 1) for theirs, ours in zip(judged.peak_bytes, measured, strict=True)]
    text = f"{of}: memory of the fullest rank, MB"
    for source, found in (("measured", measured), ("simulated", judged.peak_bytes)):
        each = tuple(one / MB for one in found)
        yield Figure(name=text, source=source, value=max(each), samples=each)
    yield Figure(
        name=f"{of}: memory of the fullest rank, simulated over measured - 1, %",
        source="measured",
        value=100 * (max(judged.peak_bytes) / max(measured) - 1),
        samples=tuple(shares),
    )


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns what a rank holds between steps, memory that is shared once."""
    parameters = [one for one in model.parameters() if not one.is_meta]
    tensors = [*parameters, *(one.grad for one in parameters if one.grad is not None)]
    tensors += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def peak_bytes(run: Callable[[], None]) -> int:
    """Returns the most that is allocated at one time while something runs, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results  # ``events()`` has only what no operator allocates
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        held += change
        most = max(most, held)
    return most
