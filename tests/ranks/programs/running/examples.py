"""The examples on ranks as they stand, and in plain data-parallel training where Mosaic's line is."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from example_cases import FOLDER, MARK, _load, plain_source
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.engine import find_modules
from mosaic.ranks import RankHandle
from ranks.graphs import in_part, plan_of

HAS = {name: importlib.util.find_spec(name) is not None for name in ("transformers", "accelerate", "lightning")}
NEEDS = {"huggingface.py": ("transformers", "accelerate"), "lightning_loop.py": ("lightning",)}
RUNS = (
    # Features of all ranks, kept of micro-batches; autocast, GradScaler, clipping.
    ("openclip.py", "--precision", "amp", "--accum-freq", "2"),
    ("huggingface.py", "--model", "audio", "--loop", "trainer"),
    ("lightning_loop.py", "--form", "trainer"),
)
for _name in HAS:
    if HAS[_name]:  # once, before ranks are forked
        importlib.import_module(_name)
if HAS["transformers"]:
    from transformers import Qwen2AudioForConditionalGeneration, Trainer  # noqa: F401
_CHANGES = (
    ("lora_dropout=0.1", "lora_dropout=0.0"),  # what a rank draws for dropout is its own
    ('0.1, "gelu"', '0.0, "gelu"'),
    # Between micro-batches DistributedDataParallel has the gradients of one rank, and this loop clips these.
    ("gradient_accumulation_steps=2", "gradient_accumulation_steps=1"),
)


class Forwarding(DistributedDataParallel):
    """Lets a loop read what belongs to the model inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def changed(source: str, rank: int) -> str:
    """Returns an example with batches of this rank's own, without dropout and without micro-batches."""
    for old, new in _CHANGES:
        source = source.replace(old, new)
    source = re.sub(r"drop=0\.\d+", "drop=0.0", source)
    return source.replace(".manual_seed(1)", f".manual_seed({1 + rank})")


def data_parallel(name: str) -> str:
    """Returns an example's source with plain data-parallel training instead of Mosaic's line."""
    if name == "huggingface.py":  # its Trainer wraps a model itself when it sees several processes
        return plain_source(name)
    instead = r"\1 = Forwarding(\1, find_unused_parameters=True); REFERENCE.append(\1.module)"
    source = (FOLDER / name).read_text(encoding="utf-8")
    replaced, count = re.subn(rf"mosaic\.colocate\((.*), sample=.*\)  {MARK}", instead, source)
    assert count == 1
    return "from ranks.programs.running.examples import Forwarding, REFERENCE\n".join(
        replaced.split("import mosaic\n", 1)
    )


REFERENCE: list[nn.Module] = []
"""Models that an example has trained in plain data-parallel training."""


def compare(name: str, arguments: Sequence[str], rank: int, size: int) -> None:
    """Runs an example both ways, and compares losses and changes of parameters."""
    REFERENCE.clear()
    ran = _load(name, changed(data_parallel(name), rank)).main(list(arguments))
    fresh_frameworks()
    theirs = ran[-1]
    trained = REFERENCE[0] if REFERENCE else ran[0]
    handles: list[RankHandle] = []
    before: dict[str, torch.Tensor] = {}
    plain = mosaic.colocate

    def planned(model: nn.Module, *, sample: Any) -> RankHandle:
        before.update({key: value.clone() for key, value in model.state_dict().items()})
        graph = find_modules(model, sample, may_share=True).graph
        plan = plan_of(graph, in_part(graph.names, size), size)
        handles.append(plain(model, sample=sample, plan=plan, backend=HostBackend(1)))
        return handles[-1]

    mosaic.colocate = planned
    try:
        *_, ours = _load(name, changed((FOLDER / name).read_text(encoding="utf-8"), rank)).main(list(arguments))
    finally:
        mosaic.colocate = plain
        fresh_frameworks()
    (handle,) = handles
    apart = relative_change(handle.full_state_dict(), trained.state_dict(), before)
    assert len(handle.plan.placements) >= 2
    handle.remove()
    losses = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True))
    low = "amp" in arguments  # 16 bits round by a thousandth or a hundredth
    assert losses < (1e-2 if low else 1e-5), (name, losses)
    assert apart < (0.1 if low else 1e-2), (name, apart)  # of what training changed


def relative_change(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> float:
    """Returns the norm of the difference between parameters over that of what training changed."""
    assert ours.keys() == theirs.keys() == before.keys()
    off = sum((ours[key].double() - theirs[key].double()).square().sum().item() for key in ours)
    moved = sum((theirs[key].double() - before[key].double()).square().sum().item() for key in ours)
    assert moved > 0
    return (off / moved) ** 0.5


def fresh_frameworks() -> None:
    """Lets the next loop choose its precision, which accelerate keeps for the process."""
    if HAS["accelerate"]:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def examples(rank: int, size: int) -> None:
    """Runs the examples whose packages are installed."""
    warnings.simplefilter("ignore")  # of the libraries' own
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # read by frameworks; nobody connects to it
    for run in RUNS:
        if all(HAS[package] for package in NEEDS.get(run[0], ())):
            compare(run[0], [*run[1:], "--steps", str(size)], rank, size)
