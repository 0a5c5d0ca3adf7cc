"""The study of Spindle's figures on a model of small layers: every figure has a number or a reason."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.figures.papers.read import asked_of
from bench.harness import study_of
from bench.record import Figure
from bench.spindle import figures, tables
from bench.spindle import workload as workloads
from bench.spindle.__main__ import KNOWN
from bench.spindle.pictures import draw
from bench.spindle.sends import sent_ms
from bench.spindle.steps import BASE, METHODS, held_gb, steps_of
from bench.spindle.workload import TASKS, Layers, Scale, workload
from mosaic.artifact import save
from mosaic.cli.workload import load_workload
from mosaic.cost.counting import count_degrees
from mosaic.graph import Edge, ModuleGraph, ModuleNode, Part
from mosaic.models.rows import CLIP_TASKS
from mosaic.plan import Grid, Placement, Stage
from mosaic.profiler import ForeignLoad
from mosaic.simulate.step import reshard_ms

WIDTHS = {"image": 512, "text": 256, "audio": 256, "depth": 128, "thermal": 256, "imu": 128}
SMALL = Scale(size="spindle", batch=64, degrees=(1, 2, 4))


@cache
def two_matrices(width: int):
    """The counts of a small module."""
    made = nn.Sequential(nn.Linear(width, 8 * width, device="meta"), nn.Linear(8 * width, width, device="meta"))
    return count_degrees(made, (torch.empty(64, width, device="meta"),), degrees=SMALL.degrees)


@pytest.fixture(autouse=True)
def small_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of each encoder two matrices: real ones take too long to count."""

    def counted(model: str, size: str, task: str, scale: Scale):
        names = CLIP_TASKS[task].reads if task in CLIP_TASKS else ("image", "text")
        edges = () if model == "multitask-clip" else (Edge(source=names[0], target=names[1], num_bytes=1000),)
        graph = ModuleGraph(modules=tuple(ModuleNode(name=name) for name in names), edges=edges)
        return graph, {name: two_matrices(WIDTHS[name]) for name in names}

    monkeypatch.setattr(workloads, "_counted", counted)
    layers = dict.fromkeys(WIDTHS, Layers(count=6, num_bytes=10**6))
    monkeypatch.setattr(workloads, "_layers", lambda model, size, task, batch: layers)


def clip(count: int = 3):
    return workload("multitask-clip", TASKS["multitask-clip"][:count], SMALL)


def checked(made: object) -> list[Figure]:
    found = list(made)
    assert len({one.name for one in found}) == len(found)
    assert all(one.reason for one in found if one.value is None)
    return found


def unmade(found: list[Figure], *at: str) -> list[str]:
    """Which figures of the page, by their numbers, none of those found is."""
    asked = [names for names in asked_of("bench_spindle") if names.replace("\\", "").partition(":")[0] in at]
    return [names for names in asked if not any(re.fullmatch(names, one.name) for one in found)]


def test_a_module_of_several_tasks_has_a_part_of_its_parameters_in_each() -> None:
    made = clip(2)
    assert made.graph.names == ("image_text/image", "image_text/text", "image_audio/image", "image_audio/audio")
    assert made.task_names == (made.graph.names[:2], made.graph.names[2:])
    shared, alone = (made.counts[name][1].memory for name in ("image_text/image", "image_text/text"))
    assert shared.gradient_bytes == 4 * (2 * 512 * 4096 + 4096 + 512) // 2
    assert alone.gradient_bytes == 4 * (2 * 256 * 2048 + 2048 + 256)
    assert made.parameters["image_text/image"] == made.parameters["image_audio/image"] == "image"


def test_every_method_plans_every_task() -> None:
    made = clip()
    found = steps_of(made, 4, 5)
    assert tuple(found) == METHODS
    assert [(name, one.status, one.reason) for name, one in found.items() if one.plan is None] == []
    assert found["spindle"].sliced
    assert found["distmm"].predicted_ms <= min(found[name].predicted_ms for name in ("distmm-mt", BASE)) * (1 + 1e-9)
    assert found["exact"].predicted_ms <= found["distmm"].predicted_ms * (1 + 1e-9)


def test_a_model_has_its_figures_8_11_and_12(tmp_path) -> None:
    found = checked(figures.figure_8("multitask-clip", (2,), (16, 32), SMALL, 5))
    assert all(one.value is not None for one in found)
    assert {one.source for one in found if one.name.startswith("Fig. 12")} == {"measured"}
    assert {one.source for one in found if one.name.startswith("Fig. 11")} == {"predicted"}
    assert {one.source for one in found if one.name.startswith("Fig. 8")} == {"simulated"}
    papers = {one.name: one.labels["paper"] for one in found if "paper" in one.labels}
    assert papers["Fig. 8: spindle: highest speed-up over megatron, multitask-clip, any tasks, 32 GPUs"] == "1.71"
    assert papers["Fig. 8: spindle: speed-up of 32 GPUs over 16, multitask-clip, 2 tasks"] == "1.45"
    assert {value for name, value in papers.items() if name.startswith("Fig. 11")} == {"below 7"}
    assert unmade(found, "Fig. 8", "Fig. 11", "Fig. 12") == []
    (path,) = draw(study_of("bench_spindle", found, ForeignLoad()), tmp_path)
    assert path.stat().st_size > 0


def test_a_device_keeps_parameters_of_several_tasks_once() -> None:
    made = clip(2)
    plan = steps_of(made, 1, 0.2, methods=(BASE,))[BASE].plan
    resident = {
        name: sum(own[1].memory.resident_bytes for module, own in made.counts.items() if module.endswith(f"/{name}"))
        for name in ("image", "text", "audio")
    }
    activations = sum(own[1].memory.activation_bytes for own in made.counts.values())
    assert held_gb(plan, made) == pytest.approx([(sum(resident.values()) + activations) / 1e9])


def test_what_stays_on_its_devices_does_not_travel() -> None:
    made = clip(1)
    _, _, cluster = made.on(16)
    name = made.graph.names[0]

    def plan(*ranks: tuple[int, ...]):
        slices = (
            Placement(part=Part(module=name, first=at, count=1, total=len(ranks)), slots=(0,), grid=Grid(ranks=own))
            for at, own in enumerate(ranks)
        )
        return SimpleNamespace(stages=[Stage(placements=(one,)) for one in slices])

    link = cluster.intra_node
    assert sent_ms(plan((0, 1), (0, 1)), made, cluster) == 0
    near_ms = sent_ms(plan((0, 1), (2, 3)), made, cluster)  # half of the bytes on each link, forward and back
    assert near_ms == pytest.approx(2 * reshard_ms(*moved((0, 1), (2, 3)), 10**6, link))
    assert sent_ms(plan((0, 1), (2, 3), (0, 1)), made, cluster) == pytest.approx(2 * near_ms)
    assert sent_ms(plan((0, 1), (8, 9)), made, cluster) > near_ms


def moved(*ranks: tuple[int, ...]) -> list[Placement]:
    return [Placement(part=Part(module="m"), slots=(0,), grid=Grid(ranks=own)) for own in ranks]


def test_estimates_are_held_against_counts_at_degrees_that_were_not_looked_at() -> None:
    scale = Scale(size="spindle", batch=64, degrees=SMALL.degrees)
    assert all(one.reason for one in checked(figures.estimates(scale)))  # nothing is left to hold them against


def test_the_table_has_the_papers_values_in_a_column_of_their_own(tmp_path) -> None:
    found = checked(figures.figure_14(SMALL, (4,), 5))
    (tmp_path / "host").mkdir()
    save(study_of("bench_spindle", found, ForeignLoad()), tmp_path / "host" / "a-bench_spindle.json")
    rows = tables.spindle_table(tmp_path).splitlines()
    assert rows[0].endswith("| measured | simulated | predicted | the Spindle paper's text |")
    (own,) = [row for row in rows if row.startswith("| Fig. 14: spindle:")]
    assert own.endswith("|  | up to 48 % faster |")
    assert tables.spindle_table(tmp_path / "nothing") == tables.NOT_YET


def test_what_nobody_could_measure_has_a_reason() -> None:
    assert all(reason for reason in KNOWN.values())
    assert sum("needs a cluster" in reason for reason in KNOWN.values()) == 5


def test_a_model_of_the_zoo_is_given_with_some_of_its_tasks() -> None:
    meta = torch.device("meta")
    assert list(load_workload("zoo:multitask-clip-tiny:2:image_text,image_audio", device=meta).sample) == [
        *("image_text", "image_audio")
    ]
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of image_text"):
        load_workload("zoo:multitask-clip-tiny:2:driving", device=meta)
    with pytest.raises(ValueError, match="there is no task 'driving'; choose some of none"):
        load_workload("zoo:clip-tiny:2:driving", device=meta)
