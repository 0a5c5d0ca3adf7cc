from rich.console import Console

from mosaic.device import Device
from mosaic.graph import Edge, ModuleGraph, ModuleNode, Part
from mosaic.plan import Placement, Plan, SearchRecord, Stage
from mosaic.report.plan_view import plan_table

HOST = Device(name="Test CPU", kind="host", num_slots=2)
GRAPH = ModuleGraph(
    modules=(
        ModuleNode(name="image", num_parameters=1_230_000),
        ModuleNode(name="audio[0]", num_parameters=4_560, trainable=False),
        ModuleNode(name="head"),
    ),
    edges=(Edge(source="image", target="head"), Edge(source="audio[0]", target="head")),
)


def placement(module: str, slots: tuple[int, ...], forward: float, backward: float) -> Placement:
    return Placement(part=Part(module=module), slots=slots, forward_ms=forward, backward_ms=backward)


PLAN = Plan(
    device=HOST,
    stages=(
        Stage(placements=(placement("image", (0,), 8, 16), placement("audio[0]", (1,), 12, 0))),
        Stage(placements=(placement("head", (0, 1), 2, 4),)),
    ),
    graph=GRAPH.fingerprint,
    sequential_ms=64,
    search=SearchRecord(method="gahc"),
)


def shown(renderable: object, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if name in line)


def test_plan_table_shows_quotas_times_and_what_is_predicted() -> None:
    text = shown(plan_table(PLAN, GRAPH))
    assert row(text, "image").split() == ["0", "image", "0", "0", "1/2", "(50%)", "8.00", "16.00", "-"]
    assert row(text, "slowest").split() == ["slowest", "12.00", "16.00"]
    assert row(text, "head").rstrip().endswith("image, audio[0]")
    assert "predicted step: 34.00 ms" in text
    assert "predicted one module at a time: 64.00 ms" in text
    assert "predicted speed-up: 1.88×" in text
    assert "measured" not in text
    assert row(shown(plan_table(PLAN)), "head").rstrip().endswith("4.00")
