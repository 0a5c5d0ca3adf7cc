"""Rungs about results: operators on a lane, towers trained side by side, random numbers in graphs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mosaic
from bench.gpu.bench import Bench
from bench.gpu.ladder import CLOSE
from bench.gpu.ladder.streams import figures_of, halves, on_lanes, reading, rung
from bench.record import Figure
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.engine import find_modules
from mosaic.microbench.kernels import half_type
from mosaic.plan import plan_from_quotas

Step = Callable[[], list[torch.Tensor]]
"""Computes forward and backward; returns the result and all gradients."""


def operators(bench: Bench) -> Iterator[Figure]:
    """Computes each operator on the default stream and on a lane."""
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes
        result = {}
        for name, step in _operators(backend, bench.dry_run).items():
            result[name] = reading(lambda step=step: _difference(step(), lane.submit(step).wait()))
            yield from figures_of({name: result[name]})
    bench.verdict = judge_equal(result)


def judge_equal(result: Mapping[str, Any]) -> str:
    """Returns a verdict on operators that differ or fail on a lane."""
    wrong = [f"{name}: {value}" for name, value in result.items() if isinstance(value, str)]
    wrong += [f"{name} differs by {v:.2g}" for name, v in result.items() if isinstance(v, float) and not v <= CLOSE]
    exact = [name for name, value in result.items() if value == 0]
    near = [f"{name} within {v:.1g}" for name, v in result.items() if isinstance(v, float) and 0 < v <= CLOSE]
    right = [f"equal bit for bit: {', '.join(exact)}"] * bool(exact) + near
    return "; ".join([*wrong, *right])


def _operators(backend: CudaBackend, dry_run: bool) -> dict[str, Step]:
    size = 8 if dry_run else 512
    left, right, bias = _leaves(backend, (size, size), (size, size), (size,))
    query, key, value = _leaves(backend, *[(2, 4, size // 4, 64)] * 3)
    table = _leaves(backend, (100, size))[0]
    ids = torch.arange(size, device=backend.torch_device) % 100
    return {
        "mm": _step(lambda: left @ right, left, right),
        "addmm": _step(lambda: torch.addmm(bias, left, right), bias, left, right),
        "attention": _step(lambda: functional.scaled_dot_product_attention(query, key, value), query, key, value),
        "layer norm": _step(lambda: functional.layer_norm(left, (size,), bias), left, bias),
        "embedding": _step(lambda: functional.embedding(ids, table), table),
    }


def convolutions(bench: Bench) -> Iterator[Figure]:
    """Runs the first convolution on a lane."""
    result = {}
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes
        for name, step in _kernels(backend, bench.dry_run).items():

            def run(step: Step = step) -> float:
                ours = lane.submit(step).wait()
                return _difference(step(), ours)

            result[name] = reading(run)
            yield from figures_of({name: result[name]})
    verdict = judge_equal(result)
    is_right = all(isinstance(value, float) and value <= CLOSE for value in result.values())
    bench.verdict = (
        verdict if is_right else f"{verdict}: leave modules with convolutions off lanes, colocate(..., exclude=[...])"
    )


def _kernels(backend: CudaBackend, dry_run: bool) -> dict[str, Step]:
    side, width = (32, 4) if dry_run else (224, 64)
    image, patch = _leaves(backend, (8, 3, side, side), (width, 3, 16, 16))
    hidden, square = _leaves(backend, (8, width, side // 4, side // 4), (width, width, 3, 3))
    return {
        "patches 16x16": _step(lambda: functional.conv2d(image, patch, stride=16), image, patch),
        "convolution 3x3": _step(lambda: functional.conv2d(hidden, square, padding=1), hidden, square),
    }


def triton(bench: Bench) -> Iterator[Figure]:
    """Runs a Triton kernel on a lane."""
    with on_lanes(bench) as backend, backend.open_lanes(halves(backend)[:1]) as lanes:
        (lane,) = lanes

        def run() -> float:
            from bench.gpu.ladder.triton_double import double

            source = torch.randn(1 << 16, device=backend.torch_device)
            return _difference([source * 2], [lane.submit(lambda: double(source)).wait()])

        result = {"double": reading(run)}
    yield from figures_of(result)
    bench.verdict = judge_triton(result)


def judge_triton(result: Mapping[str, Any]) -> str:
    """Returns a verdict on the placement of compiled branches."""
    value = result["double"]
    if value == 0:
        return "Triton kernels run on lanes: compiled branches can be placed"
    problem = value if isinstance(value, str) else f"wrong by {value:.2g}"
    return f"{problem}: leave compiled branches out of plans here, colocate(..., exclude=[...])"


def _leaves(backend: CudaBackend, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    device = backend.torch_device
    generator = torch.Generator(device).manual_seed(0)
    dtype = half_type(device)
    return [torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def _step(forward: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Step:
    def step() -> list[torch.Tensor]:
        result = forward()
        gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
        return [result.detach(), *gradients]

    return step


def _difference(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> float:
    """Returns the largest relative difference of any tensor, in the norm of the whole."""
    pairs = [(a.double(), b.double()) for a, b in zip(theirs, ours, strict=True)]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-12)) for a, b in pairs)


CLOSE_TRAINED = 1e-3
"""Relative difference of float32 losses and weights after ten steps that the order of sums may make."""
STEPS = 10


class Towers(nn.Module):
    """Two equal towers and the product of their results."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(*(_block(width) for _ in range(depth))) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.left(x) * self.right(y)).mean()


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def judge_towers(result: Mapping[str, Any]) -> str:
    """Returns a verdict on equality with the plain loop, and on the overlap of the towers."""
    if "error" in result:
        return f"two towers cannot be colocated: {result['error']}"
    far = max(result["loss difference"], result["weight difference"])
    words = f"equal within {far:.1g}" if far <= CLOSE_TRAINED else f"WRONG NUMBERS: {far:.2g} from the plain loop's"
    words += f"; lanes overlap during {result['overlap']:.0%} of their time"
    if result["overlap"] < 0.5:
        words += ", so one waits for the other: check events and the launching thread first"
    return f"{words}; a step takes {result['plain step ms']:.2f} ms plain, {result['colocated step ms']:.2f} colocated"


@rung(judge_towers)
def towers(bench: Bench, backend: CudaBackend) -> dict[str, Any]:
    """Trains ten steps plain and colocated by an even split."""
    width, depth, rows = (8, 2, 4) if bench.dry_run else (2048, 8, 4096)
    torch.manual_seed(0)
    model = Towers(width, depth).to(backend.torch_device)
    twin = copy.deepcopy(model)
    batch = tuple(torch.randn(rows, width, device=backend.torch_device) for _ in range(2))
    plain_ms, plain = _train(model, batch, backend)
    left, right = halves(backend)
    plan = plan_from_quotas(
        [{"left": len(left), "right": len(right)}], graph=find_modules(twin, batch).graph, device=backend.device
    )
    handle = mosaic.colocate(twin, sample=batch, plan=plan, backend=backend)
    try:
        ours_ms, ours = _train(twin, batch, backend)
        spans = handle.timeline()
    finally:
        handle.remove()
    weights = [
        float((a - b).detach().norm() / a.detach().norm())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    return {
        "loss difference": max(abs(a - b) / max(1e-12, abs(a)) for a, b in zip(plain, ours, strict=True)),
        "weight difference": max(weights),
        "overlap": spans.overlap,
        "plain step ms": plain_ms,
        "colocated step ms": ours_ms,
    }


def _train(model: nn.Module, batch: tuple[torch.Tensor, ...], backend: CudaBackend) -> tuple[float, list[float]]:
    """Returns the milliseconds of a step after warm-up, and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    began = 0.0
    for step in range(STEPS):
        if step == STEPS // 2:
            backend.api.synchronize()
            began = time.perf_counter()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    backend.api.synchronize()
    return (time.perf_counter() - began) * 1e3 / (STEPS - STEPS // 2), [float(loss) for loss in losses]


def judge_dropout(result: Mapping[str, Any], torch_version: str = torch.__version__) -> str:
    """Returns a verdict on unordered replays of graphs with random numbers."""
    if "error" in result:
        return f"dropout cannot be captured on lanes: {result['error']}"
    names = ("replays with other numbers", "replays that repeat the one before", "replays equal on both lanes")
    wrong = [f"{result[name]} {name}" for name in names if result[name]]
    if abs(result["share kept"] - 0.5) > 0.02:
        wrong.append(f"{result['share kept']:.0%} kept where half should be")
    if not wrong:
        return f"{result['replays']} replays drew the same numbers concurrently as in turn (torch {torch_version})"
    remedy = f"modules with random numbers must not be captured on torch {torch_version}"
    return f"of {result['replays']}: {', '.join(wrong)}; {remedy}"


@rung(judge_dropout)
def dropout(bench: Bench, backend: CudaBackend) -> dict[str, Any]:
    """Replays two graphs with dropout, each on its lane: in turn, and then unordered with the same seed."""
    replays = 2 if bench.dry_run else 40
    with backend.open_lanes(halves(backend)) as lanes:
        graphs = [_DropoutGraph(backend, lane.stream, 1 << (14 if bench.dry_run else 22)) for lane in lanes]
        in_turn = _masks(backend, graphs, replays, in_turn=True)
        at_once = _masks(backend, graphs, replays, in_turn=False)
        for graph in graphs:
            graph.graph.reset()
    left, right = at_once[::2], at_once[1::2]
    return {
        "replays": len(at_once),
        "replays with other numbers": sum(not torch.equal(a, b) for a, b in zip(in_turn, at_once, strict=True)),
        "replays that repeat the one before": sum(torch.equal(a, b) for a, b in pairwise(left)),
        "replays equal on both lanes": sum(torch.equal(a, b) for a, b in zip(left, right, strict=True)),
        "share kept": float(torch.stack(at_once).float().mean()),
    }


class _DropoutGraph:
    def __init__(self, backend: CudaBackend, stream: Any, size: int) -> None:
        api = backend.api
        self.stream, self.graph = stream, api.new_graph()
        self._ones = torch.ones(size, device=backend.torch_device)
        api.synchronize()
        with api.use_stream(stream):
            nn.functional.dropout(self._ones, 0.5)
        api.synchronize()
        with api.capture(self.graph, stream=stream, pool=api.new_graph_pool()):
            for _ in range(8):  # long enough for an interleaving of the lanes
                self.masked = nn.functional.dropout(self._ones, 0.5)

    def replay(self, api: Any) -> torch.Tensor:
        with api.use_stream(self.stream):
            self.graph.replay()
            return self.masked > 0


def _masks(backend: CudaBackend, graphs: list[_DropoutGraph], replays: int, *, in_turn: bool) -> list[torch.Tensor]:
    """Returns the kept elements of each replay, alternately of the left and the right lane."""
    torch.manual_seed(1)
    result = []
    for _ in range(replays):
        for graph in graphs:
            result.append(graph.replay(backend.api))
            if in_turn:
                backend.api.synchronize()
    backend.api.synchronize()
    return result
