"""The example of pipelines under torchrun's restarts: one rank kills itself, and the run goes on."""

from __future__ import annotations

import os
import random
import runpy
import sys
from functools import partial
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mosaic
from mosaic.checkpoint.methods import KeptModel
from mosaic.ranks.pipeline.handle import Pipeline, Step
from ranks.begun import kill_this_process

EXAMPLE = Path(__file__).parents[4] / "examples" / "pipeline.py"
STEPS, MICROBATCHES, WIDTH, LAYERS = 6, 3, 32, 3


def program(folder: Path, kill_rank: int, kill_step: int) -> None:
    """What torchrun starts."""
    torch.set_num_threads(1)
    step, is_first, done = Pipeline.step, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", []

    def step_or_die(pipe: Pipeline, microbatches: Step) -> torch.Tensor:
        if is_first and (pipe.world.rank, len(done)) == (kill_rank, kill_step):
            kill_this_process()
        done.append(microbatches)
        return step(pipe, microbatches)

    Pipeline.step = step_or_die  # type: ignore[assignment,method-assign]
    mosaic.pipeline = partial(mosaic.pipeline, trial=False)  # which another test of the example has
    asked = {"steps": STEPS, "microbatches": MICROBATCHES, "width": WIDTH, "layers": LAYERS, "checkpoint": folder}
    sys.argv = [EXAMPLE.name, *(text for name, value in asked.items() for text in (f"--{name}", str(value)))]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def restarted(rank: int, size: int, place: Path) -> None:
    """What ``torchrun --nproc-per-node 2 --max-restarts 1`` does, with a rank that is killed at a random step."""
    draw = random.Random()
    kill_rank, kill_step = draw.randrange(2), draw.randrange(3, STEPS)
    print(f"killed rank {kill_rank} at step {kill_step}", flush=True)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="fork",
    )
    elastic_launch(settings, program)(place / "kept", kill_rank, kill_step)
    check_trained(place / "kept")


def check_trained(kept: Path) -> None:
    """Compares what is in the last checkpoint with a plain loop that nobody disturbed."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    plain = example["make_model"](WIDTH, LAYERS)
    found = example["make_model"](WIDTH, LAYERS)
    loaded = KeptModel(found).load(kept)
    assert loaded is not None
    assert loaded.step == STEPS
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in example["make_steps"](STEPS, MICROBATCHES):
        for one in step:
            (plain(**one).loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, one in plain.named_parameters():
        assert (found.get_parameter(name) - one).norm() <= 1e-5 * (1e-3 + one.norm()), name
    print("equal")
