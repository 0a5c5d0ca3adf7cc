"""The study of ranks at sizes that take a moment: every figure has a name, a source, samples, or a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.bounded import PartFailedError
from bench.ranks import __main__ as bench_ranks
from bench.ranks import layer_tables as ranks_tables
from bench.ranks import pictures as ranks_pictures
from bench.ranks.launch import on_ranks
from bench.ranks.measured import links, moved, one, peak
from bench.ranks.simulated import large_cluster, scaling
from bench.ranks.tape import Tape
from bench.record import Figure, Study
from bench.study_parts import StudyPart
from mosaic.artifact import load
from mosaic.cost.communication import ModuleTraffic
from mosaic.graph import Edge, ModuleGraph, ModuleNode


def summed(rank: int, size: int) -> Iterator[Figure]:
    found = torch.tensor([rank + 1.0])
    dist.all_reduce(found)
    yield one("sum", found.item())


def one_that_fails(rank: int, size: int) -> Iterator[Figure]:
    yield one("first", 1.0)
    if rank == 1:
        raise ValueError("no data")


def taped(rank: int, size: int) -> Iterator[Figure]:
    def step() -> float:
        found = torch.tensor([rank + 1.0])
        work = dist.all_reduce(found, async_op=True)
        work.wait()
        got = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(got, found * (rank + 1))
        return float(sum(got))

    tape = Tape()
    with tape.recording():
        whole = step()
    with tape.left_out():
        alone = step() if rank == 0 else whole  # the other rank does not come
    yield one("whole", whole)
    yield one("alone", alone)
    yield one("calls", len(tape.calls))
    yield one("played", tape.play_ms())


def test_what_the_first_rank_yields_is_kept():
    assert [(f.name, f.value) for f in on_ranks(summed, 3, 60)] == [("sum", 6.0)]


def test_a_rank_that_fails_is_named_and_what_was_made_before_stays():
    kept = []
    with pytest.raises(PartFailedError, match="rank 1: ValueError: no data"):
        kept.extend(on_ranks(one_that_fails, 2, 60))
    with pytest.raises(PartFailedError, match="no time left"):
        list(on_ranks(summed, 2, 0))


def test_a_step_without_its_collectives_finds_what_they_gave():
    found = {figure.name: figure.value for figure in on_ranks(taped, 2, 60)}
    assert found["whole"] == found["alone"] == 9.0
    assert found["calls"] == 2
    assert found["played"] > 0


def test_what_is_measured_on_two_ranks_has_a_name_and_samples():
    found = list(on_ranks(partial(moved, model="clip", batch=2, steps=2), 2, 120))
    names = [figure.name for figure in found]
    assert len(set(names)) == len(names)
    ratio = next(figure for figure in found if figure.name.startswith("rows moved in a step over the least"))
    assert ratio.value is not None
    assert ratio.value >= 1.0
    for figure in found:
        assert figure.value is None or len(figure.samples) == int(figure.labels["samples"])
    assert any(figure.name.startswith("overlap") for figure in found)
    sources = {figure.name: figure.source for figure in on_ranks(links, 2, 120)}
    assert sources["rows of 64 KiB from 2 ranks to one, ms"] == "measured"
    assert sources["rows of 64 KiB from 2 ranks to one, predicted, ms"] == "predicted"
    (grown,) = on_ranks(partial(peak, model="clip", batch=2, with_mosaic=False), 2, 120)
    assert grown.value == max(grown.samples) > 0


@pytest.fixture
def made_up_table(monkeypatch: pytest.MonkeyPatch) -> None:
    degrees = (1, 2, 4, 8)
    modules = []
    for name, work in (("a", 40.0), ("b", 20.0), ("head", 10.0)):
        times = tuple(tuple(0.1 + work / (degree * quota) for quota in range(1, 17)) for degree in degrees)
        modules.append(
            ranks_tables.ModuleTable(
                module=name,
                forward_ms=times,
                backward_ms=times,
                memory_bytes=(10,) * 4,
                kept_bytes=(5,) * 4,
                traffic=ModuleTraffic(arguments=10**6, results=10**6, parameter_gradients=10**7),
            )
        )
    graph = ModuleGraph(
        modules=tuple(ModuleNode(name=module.module) for module in modules),
        edges=(Edge(source="a", target="head"), Edge(source="b", target="head")),
    )
    table = ranks_tables.ModelTable(
        model="made up", batch=8, device="h100-80g", degrees=degrees, graph=graph, modules=tuple(modules)
    )
    monkeypatch.setattr(ranks_tables, "TABLES", dict.fromkeys(("ofasys", "qwen-val-30b"), lambda: table))
    ranks_tables.load_table.cache_clear()


@pytest.mark.usefixtures("made_up_table")
def test_simulated_figures_are_labelled_and_have_the_papers_numbers_beside():
    found = {f.name: f for f in scaling(name="ofasys", num_devices=(8,), seconds=2, paper="14a")}
    assert {figure.source for figure in found.values()} == {"simulated"}
    spindle = found["spindle: step over auto's, ofasys, 8 GPUs, ratio"]
    assert spindle.labels["paper"] == "1.30"
    assert found["auto: step over auto's, ofasys, 8 GPUs, ratio"].value == 1.0
    large = {f.name: f for f in large_cluster(name="qwen-val-30b", num_devices=8, seconds=2)}
    assert large["spindle: speed-up over megatron, qwen-val-30b, 8 GPUs"].labels["paper"] == "1.34"


@pytest.mark.usefixtures("made_up_table")
def test_the_study_writes_what_it_could_not_have_with_the_reason(tmp_path: Path):
    path = tmp_path / "study.json"
    parts = [
        StudyPart.alone("simulated", 30, partial(scaling, name="ofasys", num_devices=(8,), seconds=2, paper="14a")),
        StudyPart.alone("absent", 30, partial(scaling, name="none", num_devices=(8,), seconds=2, paper="9")),
        bench_ranks._ranks("failing", 30, 2, one_that_fails),
    ]
    made = bench_ranks.STUDY.run(parts, path=path)
    assert load(Study, path) == made
    by_name = {figure.name: figure for figure in made.figures}
    assert all(by_name[name].value is None and by_name[name].reason for name in bench_ranks.NEEDS_GPU)
    assert "none" in by_name["absent: what is missing of it"].reason
    assert "no data" in by_name["failing: what is missing of it"].reason
    assert all(figure.value is not None or figure.reason for figure in made.figures)
    drawn = ranks_pictures.draw(made, tmp_path)
    assert [file.name for file in drawn] == ["ranks-scale.png"]
    assert json.loads(path.read_text())["study"] == "bench_ranks"
