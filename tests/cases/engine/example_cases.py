"""Running the files under ``examples/`` twice: as they stand, and without the lines that Mosaic adds."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import mosaic
from mosaic.backends.host.backend import HostBackend
from mosaic.demo.run import one_slot_plan
from mosaic.engine import Handle, find_modules

FOLDER = Path(__file__).parents[3] / "examples"
MARK = "# <- mosaic"
_PLAIN = re.compile(r"^(\s*)# plain: (.*)$")


def added_lines(name: str) -> list[str]:
    """Returns the lines of an example that Mosaic adds."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.endswith(MARK)]


def plain_source(name: str) -> str:
    """Returns an example without those lines, and with what they stand for where a comment says so."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return "\n".join(_PLAIN.sub(r"\1\2", line) for line in lines if not line.endswith(MARK))


@dataclass
class Ran:
    """The results of an example."""

    returned: tuple[Any, ...]
    """The results of its ``main``: models, optimizers, losses and other values."""
    handles: list[Handle] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    described: list[str] = field(default_factory=list)


def run_plain(name: str, arguments: Sequence[str] = ()) -> Ran:
    """Runs an example without the lines that Mosaic adds."""
    source = plain_source(name)
    assert "mosaic.colocate" not in source.split("def main")[-1]
    with _one_thread():
        example = _load(name, source)
        return Ran(example.main(list(arguments)))


def run_colocated(name: str, arguments: Sequence[str] = ()) -> Ran:
    """Runs an example as it stands, by a plan that puts each module on one core, so that nothing is measured."""
    handles: list[Handle] = []
    colocate = mosaic.colocate

    def planned(model: nn.Module, *, sample: Any, **more: Any) -> Handle:
        backend = HostBackend(num_slots=2)
        graph = find_modules(model, sample, include=more.get("modules"), exclude=more.get("exclude", ())).graph
        plan = one_slot_plan(graph, backend.device)
        handles.append(colocate(model, sample=sample, plan=plan, backend=backend, **more))
        return handles[-1]

    with _one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "colocate", planned)
        try:
            example = _load(name, (FOLDER / name).read_text(encoding="utf-8"))
            ran = Ran(example.main(list(arguments)), handles)
            ran.metrics = [handle.metrics() for handle in handles]
            ran.described = [handle.describe() for handle in handles]
            return ran
        finally:
            for handle in handles:
                handle.remove()


def assert_equal(plain: Ran, colocated: Ran) -> None:
    """Holds everything that came out equal, bit for bit: losses, parameters, buffers, optimizer state."""
    ours, theirs = _values(colocated.returned), _values(plain.returned)
    assert ours.keys() == theirs.keys()
    assert any(isinstance(value, torch.Tensor) for value in ours.values())
    different = [key for key, value in ours.items() if not _same(value, theirs[key])]
    assert different == []


def check(name: str, arguments: Sequence[str] = (), *, placed: set[str] | None = None) -> Ran:
    """Holds an example equal to its plain form, with every call after the first of its kind on a lane."""
    plain = run_plain(name, arguments)
    ran = run_colocated(name, arguments)
    assert_equal(plain, ran)
    assert ran.handles
    for metrics, described in zip(ran.metrics, ran.described, strict=True):
        assert metrics["calls_in_place"] == 0, described
    if placed is not None:
        assert {name for handle in ran.handles for name in handle.graph.names} == placed
    on_lanes = {key.split("/")[1] for metrics in ran.metrics for key in metrics if key.startswith("forward_ms/")}
    assert on_lanes == {name for handle in ran.handles for name in handle.graph.names}
    return ran


def _values(returned: Any) -> dict[str, Any]:
    opened = pytree.tree_map(_state, returned, is_leaf=lambda v: isinstance(v, nn.Module | torch.optim.Optimizer))
    leaves, _ = pytree.tree_flatten_with_path(opened)
    return {pytree.keystr(path): leaf for path, leaf in leaves}


def _state(value: Any) -> Any:
    return dict(value.state_dict()) if isinstance(value, nn.Module | torch.optim.Optimizer) else value


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return type(ours) is type(theirs) and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return bool(ours == theirs)


def _load(name: str, source: str) -> Any:
    module = types.ModuleType("example_" + Path(name).stem)
    module.__file__ = str(FOLDER / name)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, str(FOLDER / name), "exec"), module.__dict__)
    return module


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
