"""Which devices jobs get where all have room: near what they read most of, and where their parameters lie."""

from __future__ import annotations

from collections.abc import Sequence

from planning_cases import flat, profile_of

from mosaic.cost import CostModel
from mosaic.graph import Edge, ModuleGraph, ModuleNode
from mosaic.solver.options import DeploymentOption
from mosaic.solver.planners.draft import DraftWave, Job, PlannerSettings, Sheet, whole_job
from mosaic.solver.planners.placing import find_homes
from mosaic.solver.stage import Machine


def homes(waves: Sequence[DraftWave], edges: Sequence[Edge] = (), num_devices: int = 4, **settings: object):
    names = dict.fromkeys(name for wave in waves for job in wave for name in job.names)
    graph = ModuleGraph(modules=tuple(ModuleNode(name=name) for name in names), edges=tuple(edges))
    sheet = Sheet(
        graph=graph,
        widths={},
        cost=CostModel.from_profile(profile_of(dict.fromkeys(names, flat(1)), num_slots=1)),
        machine=Machine(num_devices=num_devices, num_slots=1, memory_bytes=0),
        settings=PlannerSettings(**settings),
    )
    return find_homes(waves, sheet, is_held=False)


def job(name: str, degree: int = 1, kept: int = 0) -> Job:
    return whole_job(
        name,
        DeploymentOption(degree=degree, quota=1, forward_ns=1, backward_ns=1, memory_bytes=kept, kept_bytes=kept),
    )


def test_a_job_goes_to_the_producer_that_hands_it_most() -> None:
    first = (job("image", 2), job("text", 2))
    for most, devices in (("image", (0, 1)), ("text", (2, 3))):
        edges = [Edge(source=name, target="head", num_bytes=9 if name == most else 3) for name in ("image", "text")]
        assert homes([first, (job("head", 2),)], edges)[1] == [devices]


def test_of_a_wave_the_job_that_reads_most_chooses_first() -> None:
    # Both read what lies on devices 0 and 1, where there is room for one of them.
    edges = [Edge(source="a", target=name, num_bytes=num) for name, num in (("small", 5), ("large", 50))]
    found = homes([(job("a", 2),), (job("small", 2), job("large", 2))], edges)
    assert found[1] == [(2, 3), (0, 1)]
    in_a_row = homes([(job("a", 2),), (job("small", 2), job("large", 2))], edges, placement="sequential")
    assert in_a_row[1] == [(0, 1), (2, 3)]


def test_modules_that_share_parameters_share_devices_where_data_does_not_say_otherwise() -> None:
    waves = [(job("caption/image", kept=9), job("caption/text", kept=3)), (job("search/image", kept=9),)]
    shared = {"caption/image": "image", "search/image": "image", "caption/text": "text"}
    assert homes(waves, parameters=shared)[1] == [(0,)]
    assert homes(waves)[1] == [(2,)]  # the emptiest
