"""The examples on two ranks as they stand, and with DistributedDataParallel where Mosaic's line is."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from example_cases import FOLDER, MARK, _load
from ranks_graphs import plan_for
from torch.nn.parallel import DistributedDataParallel

import mosaic
from mosaic.backends.host import HostBackend
from mosaic.engine import find_modules
from mosaic.ranks import RankHandle


class Forwarding(DistributedDataParallel):
    """Lets a loop read what belongs to the model inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def with_data_parallel(name: str) -> str:
    """Returns an example's source with its own line replaced."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    wrapping = "model = Forwarding(model, find_unused_parameters=True)"
    return "\n".join(
        line[: len(line) - len(line.lstrip())] + wrapping if line.endswith(MARK) else line for line in lines
    )


def compare(name: str, arguments: Sequence[str], rank: int, size: int) -> tuple[float, float, list[str]]:
    """Runs an example both ways; returns how far losses and parameters are apart, and what was placed."""
    source = with_data_parallel(name).replace(
        "import mosaic\n", "import mosaic\nfrom ranks_examples import Forwarding\n"
    )
    data_parallel = _load(name, source)
    wrapped, *_, their_losses = data_parallel.main(list(arguments))

    handles: list[RankHandle] = []
    plain = mosaic.colocate

    def planned(model: torch.nn.Module, *, sample: Any) -> RankHandle:
        names = find_modules(model, sample, may_share=True).graph.names
        members = {name: ((index % size,) if index % 3 else tuple(range(size))) for index, name in enumerate(names)}
        plan = plan_for(model, sample, members, size)
        handles.append(plain(model, sample=sample, plan=plan, backend=HostBackend(1)))
        return handles[-1]

    mosaic.colocate = planned
    try:
        ran = _load(name, (FOLDER / name).read_text(encoding="utf-8"))
        _, *_, losses = ran.main(list(arguments))
    finally:
        mosaic.colocate = plain
    (handle,) = handles
    ours, theirs = handle.full_state_dict(), wrapped.module.state_dict()
    apart = max((ours[key].float() - theirs[key].float()).abs().max().item() for key in theirs)
    placed = list(handle.graph.names)
    handle.remove()
    return max(abs(a - b) for a, b in zip(losses, their_losses, strict=True)), apart, placed


RUNS = (
    ("openclip.py", "--precision", "amp_bf16"),  # features of all ranks, autocast, clipping
    ("openclip.py", "--precision", "amp", "--accum-freq", "2"),  # and GradScaler, and features kept of micro-batches
    ("huggingface.py", "--model", "llava"),  # whose table is looked up outside of the language model
)


def examples(rank: int, size: int) -> dict[str, Any]:
    """Runs examples; those of transformers where that is installed."""
    there = importlib.util.find_spec("transformers") is not None
    return {
        " ".join(run): compare(run[0], [*run[1:], "--steps", "4"], rank, size)
        for run in RUNS
        if there or not run[0].startswith("huggingface")
    }
