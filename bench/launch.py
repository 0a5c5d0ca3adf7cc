"""The CPU time that launching a training step takes: ``python -m bench.launch``. Needs a CUDA device.

Two small towers of transformer layers, five operations between them and the loss, and AdamW. The plain loop and the
colocated one take steps in turn in one process. A step's launching is the CPU time of the whole process: of the loop's
thread, and of autograd's, which launches the backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import mosaic
from bench.harness import study_of
from bench.record import Figure
from mosaic.artifact import save
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import find_modules
from mosaic.plan import plan_from_quotas

WIDTH, ROWS, TOKENS = 64, 8, 16


class TwoTowers(nn.Module):
    """Two encoders of the same depth and a contrastive loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                *(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(num_layers))
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x).mean(1), self.right(y).mean(1)
        left, right = nn.functional.normalize(left, dim=-1), nn.functional.normalize(right, dim=-1)
        return left @ right.T


def stepper(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Callable[[], tuple[float, float]]:
    """Returns a function that takes one step and returns its CPU time and that of its forward, in milliseconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    target = torch.arange(ROWS, device=batch[0].device)

    def step() -> tuple[float, float]:
        torch.cuda.synchronize()
        began, forward_began = time.process_time(), time.thread_time()
        loss = nn.functional.cross_entropy(model(*batch), target)
        forward = time.thread_time() - forward_began
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = time.process_time() - began
        torch.cuda.synchronize()
        return whole * 1e3, forward * 1e3

    return step


def measure(num_layers: int, steps: int, *, cuda_graphs: bool) -> list[Figure]:
    backend = CudaBackend()
    device, slots = backend.torch_device, backend.device.num_slots
    torch.manual_seed(0)
    plain = TwoTowers(num_layers).to(device)
    lanes = copy.deepcopy(plain)
    batch = tuple(torch.randn(ROWS, TOKENS, WIDTH, device=device) for _ in range(2))
    graph = find_modules(lanes, batch).graph
    plan = plan_from_quotas([{"left": slots // 2, "right": slots // 2}], graph=graph, device=backend.device)
    options = mosaic.Options(cuda_graphs=cuda_graphs)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "lanes": []}
    with torch.inference_mode(False):
        handle = mosaic.colocate(lanes, sample=batch, plan=plan, backend=backend, options=options)
        steppers = {"plain": stepper(plain, batch), "lanes": stepper(lanes, batch)}
        for turn in range(steps + 5):
            for name, step in steppers.items():
                taken = step()
                if turn >= 5:
                    times[name].append(taken)
        handle.remove()
    labels = {"layers": str(num_layers), "cuda_graphs": str(cuda_graphs)}
    figures = []
    for index, what in enumerate(("a step", "a forward, its thread alone")):
        ratios = [lane[index] / own[index] for lane, own in zip(times["lanes"], times["plain"], strict=True)]
        medians = {name: statistics.median(taken[index] for taken in times[name]) for name in times}
        figures += [
            Figure(name=f"CPU of {what}, {name}, ms", source="measured", value=value, labels=labels)
            for name, value in medians.items()
        ]
        low, _, high = statistics.quantiles(ratios, n=4)
        figures.append(
            Figure(
                name=f"CPU of {what}, lanes over plain (quartiles of pairs)",
                source="measured",
                value=medians["lanes"] / medians["plain"],
                low=low,
                high=high,
                labels=labels,
            )
        )
    return figures


def main() -> None:
    """Measures, prints, and writes a result file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description="Measure what launching a step costs.")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 12], help="layers of each tower")
    parser.add_argument("--steps", type=int, default=60, help="steps of each loop")
    parser.add_argument("--cuda-graphs", action="store_true", help="launch the towers as CUDA graphs")
    parser.add_argument("--out", type=Path, help="a result file to write")
    asked = parser.parse_args()
    figures = [f for layers in asked.layers for f in measure(layers, asked.steps, cuda_graphs=asked.cuda_graphs)]
    for figure in figures:
        interval = "" if figure.low is None else f" [{figure.low:.3f}, {figure.high:.3f}]"
        print(f"{figure.labels['layers']:>3} layers  {figure.name:56} {figure.value:.3f}{interval}", flush=True)
    if asked.out is not None:
        study = study_of("launch", figures, None, CudaBackend().device)
        save(study, asked.out)


if __name__ == "__main__":
    main()
