"""Results that go straight from one module's ranks to another's: what ranks do in the tests of it."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.errors import ModuleContractError, RankFailedError
from mosaic.ranks.choosing.routed import Routes, sent_bytes
from mosaic.ranks.running.prepare import prepare
from ranks.graphs import colocated, difference, subsets, twins

WIDTH = 5
STEPS = 2
KINDS = ("equal", "disjoint", "overlapping", "any", "any", "nested")


class Fuse(nn.Module):
    """Joins what comes straight from two modules and what comes from home; one result goes on, one goes home."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, left: torch.Tensor, here: torch.Tensor, *, right: torch.Tensor) -> dict[str, torch.Tensor]:
        made = torch.tanh(self.net(torch.cat([left, here, right], dim=-1)))
        return {"on": made, "home": made * 2}


class Relay(nn.Module):
    """Chains and a diamond of modules that hand their results on as they are; the sound may be missing."""

    def __init__(self, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.eye, self.project, self.touch = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fuse, self.head = Fuse(), nn.Linear(WIDTH, WIDTH)
        self.ear, self.adapt = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.eye.requires_grad_(not frozen)
        if tied:  # calls of both run in place
            self.project.weight = self.adapt.weight = self.head.weight
        self.does = ""

    def forward(
        self, image: torch.Tensor, force: torch.Tensor, ids: torch.Tensor, sound: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        heard = None if sound is None else self.ear(sound)
        heard = None if heard is None or self.does == "half" else self.adapt(heard)
        seen = self.eye(image)
        if self.does == "reads":
            seen = seen + 1
        if self.does == "swaps":
            seen = image
        assert len(seen) == len(image)
        fused = self.fuse(self.project(seen), ids, right=self.touch(force))
        logits = self.head(fused["on"])
        made = {"home": fused["home"], "logits": logits if heard is None else logits + heard}
        return made | ({"seen": seen} if self.does == "returns" else {})


NAMES = ["ear", "adapt", "eye", "project", "touch", "fuse", "head"]


def batch(step: int, rows: list[int], rank: int, silent: tuple[int, ...] = ()) -> tuple[torch.Tensor | None, ...]:
    generator = torch.Generator().manual_seed(step)
    part = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    made = [torch.randn(sum(rows), WIDTH, generator=generator)[part] for _ in range(4)]
    return (*made[:3], None if rank in silent else made[3])


def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((value.square().mean() for value in out.values()), torch.zeros(()))


def train(model: nn.Module, rows: list[int], rank: int, silent: tuple[int, ...]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model(*batch(step, rows, rank, silent)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(loss_of(model(*batch(STEPS, rows, rank, silent))).item())
    return losses


def case(seed: int, rank: int, size: int) -> dict[str, Any]:
    """One random layout: how far the loop is from DistributedDataParallel, and what it sends either way."""
    kind = KINDS[seed % len(KINDS)]
    draw = random.Random(seed)
    rows = [draw.randint(1, 5) for _ in range(size)]
    odd = draw.randrange(size)
    silent = (odd,) if seed % 2 else ()
    members = subsets(kind, NAMES, size, draw)
    frozen, tied = draw.random() < 0.3, seed % 3 == 2
    found: dict[str, Any] = {"kind": kind, "members": members, "tied": tied}
    model, wrapped = twins(lambda: Relay(frozen, tied), seed)
    start = copy.deepcopy(model.state_dict())
    wrapped.module.does = "half" if rank == odd and seed % 2 == 0 else ""
    theirs = train(wrapped, rows, rank, silent)
    for direct in (True, False):
        model.load_state_dict(start)  # the same one again: nothing of its first handle is left
        model.does = ""
        handle = colocated(model, batch(0, [3] * size, rank), members, size, direct=direct)
        model.does = wrapped.module.does
        ours = train(model, rows, rank, silent)
        metrics = {name: n for name, n in handle.metrics().items() if name.startswith("sent_bytes/")}
        sent = sum(n for name, n in metrics.items() if "/reduce/" not in name)
        found |= {
            f"loss {direct}": max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True)),
            f"parameters {direct}": difference(handle, wrapped),
            f"sent {direct}": handle.world.tell(sent),
            f"in place {direct}": handle.describe().count("ran in place"),
            f"straight {direct}": handle.describe().count("go straight to the ranks of"),
        }
        handle.remove()
    return found


def observed(rank: int, size: int) -> dict[str, Any]:
    """One start of the ranks serves all of it."""
    return {
        "cases": [case(seed, rank, size) for seed in (2, 3)],
        "predicted": [predicted(kind, direct, rank, size) for kind, direct in PREDICTED],
        "misused": misused(rank, size),
    }


PREDICTED = (("equal", True), ("disjoint", True), ("overlapping", True), ("any", True), ("overlapping", False))


def predicted(kind: str, direct: bool, rank: int, size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns what is predicted to be sent in a step, and what all ranks together have sent in one."""
    torch.manual_seed(0)
    model = Relay(frozen=kind == "any")
    members = subsets(kind, NAMES, size, random.Random(5))
    sample = batch(0, [5] * size, rank)
    handle = colocated(model, sample, members, size, direct=direct)
    twin = Relay(frozen=kind == "any")
    routes = Routes.agreed(prepare(handle.world, twin, sample, HostBackend(1), modules=NAMES, direct=direct))
    wanted = {f"sent_bytes/{phase}/{name}": n for (name, phase), n in sent_bytes(routes.of(handle.plan)).items()}
    loss_of(model(*sample)).backward()
    told = handle.world.tell({name: n for name, n in handle.metrics().items() if name.startswith("sent_bytes/")})
    handle.remove()
    names = {name for one in told for name in one if "/reduce/" not in name}
    return wanted, {name: sum(one.get(name, 0) for one in told) for name in names}


def misused(rank: int, size: int) -> dict[str, str]:
    """Uses results that go straight in ways that the sample's step did not; the last on one rank alone."""
    torch.manual_seed(0)
    model, plain = Relay(), Relay()
    plain.load_state_dict(model.state_dict())
    rows = [2, 3, 1][:size]
    handle = colocated(model, batch(0, [3] * size, rank), dict.fromkeys(NAMES, (0,)), size)
    found = {}
    for use in ("reads", "returns", "swaps"):
        model.does = use
        try:
            model(*batch(0, rows, rank))
        except ModuleContractError as error:
            found[use] = str(error)
        model.does = ""
        made = model(*batch(1, rows, rank))  # all of them raised, and go on together
        found[f"after {use}"] = str(torch.allclose(made["logits"], plain(*batch(1, rows, rank))["logits"], atol=1e-5))
        loss_of(made).backward()
    image = batch(1, rows, rank)[0]
    found["outside"] = str(torch.allclose(model.eye(image) + 1, plain.eye(image) + 1, atol=1e-5))
    model.does = "reads" if rank == 0 else ""
    try:
        model(*batch(0, rows, rank))
    except (ModuleContractError, RankFailedError) as error:
        found["alone"] = f"{type(error).__name__}: {error}"
        handle.world.close(error)  # as when it ends the program
    return found
