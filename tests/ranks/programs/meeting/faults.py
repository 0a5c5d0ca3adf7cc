"""What goes wrong on ranks: each function is one rank's program, run by ``ranks.nursery`` until it ends or hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mosaic.backends.host.backend import HostBackend
from mosaic.engine.options import Options, RankSettings
from mosaic.plan import Plan
from mosaic.ranks.colocate import colocate_ranks
from ranks.begun import ROWS, SHORT_S, STEPS, WATCH, at_step, begin, halves, join, kill_this_process, train, watching
from ranks.graphs import colocated
from ranks.training import Model, batch, loss_of

WHOLE_EXITS = {"in_order"}
"""Programs that are torn down to the last; for the others that would cost more than what they do."""


# Killed.


def killed_before_a_call(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    train(model, before=at_step(2, kill_this_process) if rank == 1 else lambda step: None)


def killed_while_it_waits_and_another_computes(rank: int, size: int, place: Path) -> None:
    """Rank 1 is killed while it waits for rank 2, which is at something else and will not come to a message."""
    model, handle = begin(rank, size, place)
    progress = handle.world.progress

    def kill_when_waiting() -> None:
        while not (progress.calls == 3 and progress.now.doing == "waiting" and progress.now.for_s > 0.3):
            pass
        kill_this_process()

    def compute() -> None:
        while True:
            sum(range(1000))

    if rank == 1:
        threading.Thread(target=kill_when_waiting, daemon=True).start()
    train(model, before=at_step(2, compute) if rank == 2 else lambda step: None)


def killed_in_a_backward(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)

    def mark(step: int) -> None:
        if rank == 0 and step == 1:
            model.mix.register_hook(lambda grad: kill_this_process())

    train(model, before=mark)


def killed_after_a_step(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 3:
        optimizer.register_step_post_hook(lambda *_: kill_this_process())
    for step in range(STEPS):
        loss_of(model(**batch(step, ROWS))).backward()
        optimizer.step()


def killed_while_it_profiles(rank: int, size: int, place: Path) -> None:
    if rank == 0:
        planning = sys.modules["mosaic.ranks.choosing.planning"]
        planning.profile_of_all = lambda *args, **options: kill_this_process()  # type: ignore[attr-defined]
    begin(rank, size, place, plan=None, timeout_s=60.0)


def killed_before_there_are_groups(rank: int, size: int, place: Path) -> None:
    from mosaic.ranks.meeting.world import World

    if rank == 1:
        World.group = lambda *args, **options: kill_this_process()  # type: ignore[assignment]
    begin(rank, size, place, timeout_s=60.0)


# Ended otherwise.


def an_error_on_one(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place)

    def fail() -> None:
        raise ValueError("no such caption")

    train(model, before=at_step(2, fail) if rank == 1 else lambda step: None)


def fewer_batches_on_one(rank: int, size: int, place: Path) -> None:
    model, handle = begin(rank, size, place)
    train(model, steps=STEPS - (rank == 1))
    if rank == 1:
        handle.remove(gather=False)
        threading.Event().wait(1.0)  # it lives on, with something else to do


def interrupted(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place, grace_s=15.0)  # each ends by itself, also where the machine is busy
    train(model, before=at_step(1, lambda: os.kill(os.getpid(), signal.SIGINT)) if rank == 1 else lambda step: None)


def fails_at_the_start(rank: int, size: int, place: Path) -> None:
    join(rank, size, place)
    model = Model()
    if rank == 1:

        def broken(*args: Any, **options: Any) -> None:
            raise OSError("no lanes here")

        HostBackend.open_lanes = broken  # type: ignore[method-assign]
    plan = halves(model, size)
    colocate_ranks(model, sample=batch(0, ROWS), backend=HostBackend(1), plan=plan, options=watching())


# Slow, or stuck.


def stopped(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place, timeout_s=SHORT_S)
    train(model, before=at_step(1, lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == 1 else lambda step: None)


def interpreter_held(rank: int, size: int, place: Path) -> None:
    """A rank that holds its interpreter for many beats is late, and nothing else."""
    model, _ = begin(rank, size, place)
    usleep = ctypes.PyDLL(None).usleep
    train(model, before=at_step(1, lambda: usleep(1_300_000)) if rank == 1 else lambda step: None)
    print("trained")


def busy(rank: int, size: int, place: Path) -> None:
    model, _ = begin(rank, size, place, timeout_s=SHORT_S)
    train(model, before=at_step(1, threading.Event().wait) if rank == 1 else lambda step: None)


def branches_in_another_order(rank: int, size: int, place: Path) -> None:
    """The loop calls the branches itself, in another order on rank 1."""
    model, _ = begin(rank, size, place, timeout_s=SHORT_S)
    given = batch(0, ROWS)
    for name in ("image", "text") if rank == 0 else ("text", "image"):
        getattr(model, name)(given[name])


def modules_in_another_order(rank: int, size: int, place: Path) -> None:
    """The model itself calls its modules in another order on rank 1."""
    model, _ = begin(rank, size, place)
    if rank == 1:

        def forward(image: torch.Tensor, text: torch.Tensor, audio: torch.Tensor) -> dict[str, torch.Tensor]:
            read = model.text(text).mean(1)
            return {"logits": read, "seen": model.image(image)}

        model.forward = forward  # type: ignore[method-assign]
    train(model, steps=1)


def other_arguments(rank: int, size: int, place: Path) -> None:
    """Rank 1's texts are longer, which no row count tells."""
    model, _ = begin(rank, size, place)
    given = batch(0, ROWS)
    if rank == 1:
        given["text"] = torch.zeros(ROWS, 9, dtype=torch.int64)
    loss_of(model(**given)).backward()


def never_comes(rank: int, size: int, place: Path) -> None:
    """Ranks 1 and 3 are there, and never call colocate."""
    join(rank, size, place)
    model = Model()
    if rank in (1, 3):
        threading.Event().wait(4.0)
        return
    colocate_ranks(
        model,
        sample=batch(0, ROWS),
        backend=HostBackend(1),
        plan=halves(model, size),
        options=Options(ranks=RankSettings(timeout_s=1.5)),
    )


def never_starts(rank: int, size: int, place: Path) -> None:
    """Ranks as torchrun would start them, of which one does not come; and one without a store to come to."""
    from mosaic.ranks.meeting.world import World

    port = place.parent / "port"
    if rank == 2:
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="localhost")
    if rank == 0:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            number = found.getsockname()[1]
        port.with_suffix(".new").write_text(str(number))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        pass
    os.environ["MASTER_PORT"] = port.read_text()
    World.join(torch.device("cpu"), timeout_s=1.5)


def no_store(rank: int, size: int, place: Path) -> None:
    from mosaic.ranks.meeting.world import World

    with socket.socket() as found:
        found.bind(("localhost", 0))
        number = found.getsockname()[1]
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(number))
    World.join(torch.device("cpu"), timeout_s=1.0)


def a_plan_that_is_no_json(rank: int, size: int, place: Path) -> None:
    from mosaic.artifact import load

    join(rank, size, place)
    path = place / f"plan{rank}.json"
    path.write_text("stages: []" if rank == 1 else "")
    if rank == 1:
        load(Plan, path)
    model = Model()
    plan = halves(model, size)
    colocate_ranks(
        model,
        sample=batch(0, ROWS),
        backend=HostBackend(1),
        plan=plan,
        options=Options(ranks=RankSettings(timeout_s=1.5)),
    )


def unlike(rank: int, size: int, place: Path) -> None:
    """Rank 1 has another torch, device, model and then sample; all ranks are told each time."""
    from mosaic.errors import MosaicError
    from mosaic.ranks.meeting.world import RankFacts

    join(rank, size, place)
    plain = RankFacts.of

    def facts(device: Any, graph: Any) -> RankFacts:
        found = plain(device, graph)
        return replace(found, **changes) if rank == 1 else found

    RankFacts.of = staticmethod(facts)  # type: ignore[method-assign]
    changes: dict[str, Any] = {}
    for changed in ({"torch": "2.5.0"}, {"sms_per_slot": 16, "num_slots": 8}, {"graph": "another"}, {}):
        changes.clear()
        changes.update(changed)
        sample = batch(0, ROWS)
        if rank == 1 and not changed:
            sample["text"] = torch.zeros(ROWS, 9, dtype=torch.int64)
        try:
            colocate_ranks(Model(), sample=sample, backend=HostBackend(1), options=watching())
        except MosaicError as error:
            print(error)


# In order.


class Sparse(nn.Module):
    """Two towers, either of which may have nothing to do, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(3, 2)
        self.text = nn.Linear(3, 2)
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, image: torch.Tensor | None, text: torch.Tensor | None) -> torch.Tensor:
        total = self.bias.square().sum()
        for tower, given in ((self.image, image), (self.text, text)):
            if given is not None:
                total = total + tower(given).square().mean()
        return total


def nothing_on_one(rank: int, size: int, place: Path) -> None:
    """Micro-steps in which ranks lack one modality or all of them: nobody waits, and sums are right.

    At last rank 0 is killed, while rank 1 has nothing and only takes part.
    """
    torch.manual_seed(0)
    model, twin = Sparse(), Sparse()
    twin.load_state_dict(model.state_dict())
    join(rank, size, place)
    x = torch.arange(12.0).view(4, 3) / 10
    members = {"image": (0,), "text": (0, 1)}
    colocated(model, {"image": x, "text": x}, members, size, timeout_s=20.0, **WATCH)
    has = {(0, 0): (x, x), (0, 1): (None, None), (1, 0): (x, None), (1, 1): (None, x), (2, 0): (None, None)}
    for micro in range(3):
        model(*has.get((micro, rank), (None, None))).backward()
        for other in range(size):
            (twin(*has.get((micro, other), (None, None))) / size).backward()
    for name, parameter in twin.named_parameters():
        own = dict(model.named_parameters())[name]
        assert own.is_meta or torch.allclose(own.grad, parameter.grad), name
    print("equal", flush=True)
    if rank == 0:
        kill_this_process()
    model(None, None)


def slow_rank(rank: int, size: int, place: Path) -> None:
    """One rank computes a module that both have for much longer."""
    from ranks.programs.meeting import restart

    join(rank, size, place)
    model = Model()
    handle = colocate_ranks(
        model,
        sample=batch(0, ROWS),
        backend=HostBackend(1),
        plan=restart.plan_for(model),
        options=watching(timeout_s=60.0),
    )
    if rank == 1:
        heavy = torch.randn(400, 400)
        model.audio.register_forward_hook(lambda *_: [heavy @ heavy for _ in range(20)] and None)
    train(model, steps=6)
    handle.write_trace(place)


def in_order(rank: int, size: int, place: Path) -> None:
    """Ranks end at different times, without a word to Mosaic, and destroy what they like."""
    model, _ = begin(rank, size, place)
    train(model)
    dist.destroy_process_group()
    if rank:
        threading.Event().wait(0.7)
    print("trained")


def caught(rank: int, size: int, place: Path) -> None:
    """The program may go on after the error: its process is not ended once it has taken its handle away."""
    from mosaic.errors import RankFailedError

    model, handle = begin(rank, size, place)
    try:
        train(model, before=at_step(1, kill_this_process) if rank == 1 else lambda step: None)
    except RankFailedError as error:
        handle.remove(gather=False)
        threading.Event().wait(WATCH["grace_s"] + 0.3)
        print("caught", error.ranks)


def uninterrupted(rank: int, size: int, place: Path) -> None:
    """The program that torchrun restarts elsewhere, here without a fault."""
    from ranks.programs.meeting import restart

    join(rank, size, place)
    restart.program(place, -1, -1)
