"""Training loops on several ranks, for the tests of ``mosaic.ranks``: each is called on every rank of a gloo group."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks
from ranks.graphs import plan_of

STEPS = 3


class Model(nn.Module):
    """Three towers with glue on each, a backbone over all of them and a head; the third input may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh())
        self.audio = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix = nn.Parameter(torch.randn(8, 8) / 3)
        self.backbone = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor | None) -> dict[str, torch.Tensor]:
        seen = self.image(image) @ self.mix
        read = self.text(text).mean(1)
        if audio is not None:
            read = read + self.audio(audio)
        return {"logits": self.head(self.backbone(torch.cat([seen, read], dim=-1))), "seen": seen}


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "image": torch.randn(rows, 6, generator=generator),
        "text": torch.randint(0, 11, (rows, 5), generator=generator),
        "audio": torch.randn(rows, 4, generator=generator),
    }


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return out["logits"].square().mean() + out["seen"].abs().mean() * 0.1


def slices(rows: list[int], rank: int) -> slice:
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


def part_of(whole: dict[str, torch.Tensor], where: slice, *, has_audio: bool) -> dict[str, Any]:
    part: dict[str, Any] = {name: tensor[where] for name, tensor in whole.items()}
    return part if has_audio else {**part, "audio": None}


def plain_training(model: Model, rows: list[int], deaf: list[int], accumulate: int, clip: float) -> list[float]:
    """What data-parallel training computes: every rank's own mean loss, and the mean of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulate):
            whole = batch(100 * step + micro, sum(rows))
            for rank in range(len(rows)):
                out = model(**part_of(whole, slices(rows, rank), has_audio=rank not in deaf))
                loss = loss_of(out)
                (loss / len(rows)).backward()
                losses.append(loss.item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def draw_plan(model: Model, size: int, draw: random.Random, *, least: int = 1) -> Plan:
    """Draws subsets of ranks: equal, disjoint, nested or partly overlapping, as it comes."""
    graph = find_modules(model, batch(0, 3)).graph
    members = {name: tuple(draw.sample(range(size), draw.randint(least, size))) for name in graph.topological_order()}
    return plan_of(graph, members, size)


def random_training(rank: int, size: int) -> list[Any]:
    """Trains under random plans on random slices of the batch, and compares with data-parallel training."""
    layouts = []
    for seed in range(4):
        draw = random.Random(seed)
        rows = [draw.randint(1, 4) for _ in range(size)]
        deaf = [r for r in range(size) if seed % 2 and draw.random() < 0.5][: size - 1]
        accumulate, clip = draw.choice([1, 2]), draw.choice([0.0, 0.05])
        everywhere = seed == 3  # where nothing is routed
        if everywhere:
            deaf, accumulate, clip = [1], 2, 0.05
        torch.manual_seed(seed + 10 * rank)  # rank 0's weights become those of all
        model = Model()
        torch.manual_seed(seed)
        twin = Model()
        expected = plain_training(twin, rows, deaf, accumulate, clip)
        plan = draw_plan(model, size, draw, least=size if everywhere else 1)
        layouts.append([list(placed.devices) for placed in plan.placements])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        handle = colocate_ranks(model, sample=batch(0, 3), plan=plan, backend=HostBackend(1))
        assert ("nothing is routed" in handle.describe()) == everywhere
        losses = []
        for step in range(STEPS):
            for micro in range(accumulate):
                whole = batch(100 * step + micro, sum(rows))
                loss = loss_of(model(**part_of(whole, slices(rows, rank), has_audio=rank not in deaf)))
                loss.backward()
                losses.append(loss.item())
            if clip:
                handle.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        own = expected[rank::size]
        assert torch.allclose(torch.tensor(losses), torch.tensor(own), atol=1e-4, rtol=1e-3), (seed, losses, own)
        found = handle.full_state_dict()
        for name, tensor in twin.state_dict().items():
            assert torch.allclose(found[name], tensor, atol=1e-4, rtol=1e-3), (seed, name)
        sent = {name for name in handle.metrics() if name.startswith("sent_bytes")}
        assert not everywhere or sent == {
            f"sent_bytes/reduce/{name}" for name in (placed.module for placed in plan.placements)
        }
        copy.deepcopy(twin).load_state_dict(found)
        here = {placed.module for placed in plan.placements if rank in placed.devices}
        for name, parameter in model.named_parameters():
            if name.split(".")[0] in ("image", "text", "audio", "backbone"):
                assert parameter.is_meta == (name.split(".")[0] not in here), name
        handle.remove()
        dist.barrier()
    return layouts


def solved(rank: int, size: int) -> tuple[str, float]:
    """Has rank 0 profile and solve; trains a step and returns the plan's name and the loss."""
    from engine_cases import FAST

    torch.manual_seed(0)
    model = Model()
    with pytest.raises(ValueError, match="cuda_graphs=True cannot be had on several ranks"):
        mosaic.colocate(model, sample=batch(0, 4), options=mosaic.Options(cuda_graphs=True))
    handle = mosaic.colocate(model, sample=batch(0, 4), backend=HostBackend(1), options=mosaic.Options(profiling=FAST))
    loss = loss_of(model(**batch(rank, 4)))
    loss.backward()
    handle.remove()
    return handle.plan.fingerprint, loss.item()


def meeting_places(rank: int, size: int) -> list[int]:
    """Colocates twice; returns for each time how many groups met where those of another run would look."""
    plain, found = dist.new_group, []

    def noting(*args: Any, **options: Any) -> Any:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"seen {rank}", "")
        found[-1] += own.check([f"seen {rank}"])
        return plain(*args, **options)

    own = dist.distributed_c10d._get_default_store()
    dist.new_group = noting  # type: ignore[assignment]
    for _ in range(2):
        found.append(0)
        model = Model()
        plan = draw_plan(model, size, random.Random(3))
        colocate_ranks(model, sample=batch(0, 3), backend=HostBackend(1), plan=plan).remove()
    assert dist.distributed_c10d._get_default_store() is own
    return found
