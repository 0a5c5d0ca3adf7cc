"""DESIGN section 3: imports point down, heavy libraries stay where they belong, public names are frozen."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mosaic

ROOT = Path(__file__).parents[2]
LAYERS = [
    {"cache_folder", "errors", "provenance"},
    {"artifact", "child", "lines", "search_extension", "user_file"},
    {"device"},
    {"graph", "hardware", "shape", "timeline"},
    {"placement", "profile", "rank_trace"},
    {"plan", "schedule"},
    {"cost", "files"},
    {"simulate", "context"},
    {"backends", "solver", "pipelining"},
    {"checkpoint", "profiler", "models", "glue", "parts"},
    {"engine"},
    {"ranks", "report"},
    {"microbench", "train"},
    {"retrain"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""Packages of one line never import each other; a package may import from any line above its own here."""

RANK_LAYERS = [
    {"rows", "meeting"},
    {"parameters"},
    {"calls"},
    {"running"},
    {"choosing", "pipeline"},
    {"__init__", "colocate", "compare"},
]
"""The same for the packages of ``mosaic.ranks``, but for its last line, which is what people import."""

ENGINE_LAYERS = [{"calls"}, {"finding", "graphs", "host"}, {"streams"}]
"""The same for the packages of ``mosaic.engine``; above them stands what people import, and the trial of plans."""

HOMES = {
    "torch": {
        *("backends", "checkpoint", "engine", "ranks", "profiler", "train", "models", "demo", "microbench", "parts"),
        *("glue", "cost/analytic", "context/attention"),
        "retrain/working",  # the launcher starts it
        "cli/workload.py",  # runs a user's model
        "cli/counting.py",  # counts its operators
    },
    "ortools": {"solver", "pipelining/proof.py", "context/exact.py"},
    "mosaic._C": {"backends/cuda/driver.py"},
    "mosaic._search": {
        "search_extension.py",
        *("solver/exact/search.py", "pipelining/compiled.py"),  # names of types alone, and below
        *("pipelining/tasks.py", "pipelining/order/simulate.py", "pipelining/tuning/pairs.py", "context/tiles.py"),
    },
    "matplotlib": {"report"},
    "rich": {"report", "cli", "demo", "microbench"},
    "tyro": {"cli"},
    "pydantic": {"artifact.py"},
}


def sources() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "mosaic").rglob("*.py")):
        yield path.relative_to(ROOT / "mosaic").as_posix(), path
    for path in sorted((ROOT / "profiler").rglob("*.py")):
        yield "profiler/" + path.relative_to(ROOT / "profiler").as_posix(), path


@functools.cache
def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def package_of(place: str) -> str:
    return place.split("/")[0].removesuffix(".py")


def rank(package: str) -> int:
    return next(index for index, line in enumerate(LAYERS) if package in line)


@pytest.mark.parametrize(("place", "path"), [pytest.param(*source, id=source[0]) for source in sources()])
def test_imports_point_down(place: str, path: Path):
    own = package_of(place)
    if own == "__init__":
        return
    others = {name.split(".")[1] for name in imports(path) if name.startswith("mosaic.")} - {own, "_C", "_search"}
    known = set().union(*LAYERS)
    upward = {other for other in others & known if rank(other) >= rank(own)}
    assert not upward, f"{place} imports {sorted(upward)} from its own line or above"


@pytest.mark.parametrize(("package", "layers"), [("engine", ENGINE_LAYERS), ("ranks", RANK_LAYERS[:-1])])
def test_imports_inside_of_a_package_point_down(package: str, layers: list[set[str]]):
    line_of = {room: number for number, line in enumerate(layers) for room in line}
    for path in sorted((ROOT / "mosaic" / package).rglob("*.py")):
        own = path.relative_to(ROOT / "mosaic" / package).parts[0].removesuffix(".py")
        if own not in line_of:
            continue
        others = {name.split(".")[2] for name in imports(path) if name.startswith(f"mosaic.{package}.")} - {own}
        upward = {other for other in others if line_of.get(other, len(layers)) >= line_of[own]}
        assert not upward, f"{path} imports {sorted(upward)}"


def test_every_package_has_a_place_in_the_layers():
    found = {package_of(place) for place, _ in sources()} - {"__init__"}
    assert found <= set().union(*LAYERS)


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_library_is_imported_only_where_it_belongs(library: str):
    homes = HOMES[library]
    strangers = [
        place
        for place, path in sources()
        if any(name == library or name.startswith(f"{library}.") for name in imports(path))
        and not homes & {place, package_of(place), str(Path(place).parent)}
    ]
    assert strangers == []


def loaded_by(statement: str, *, after: str = "pass") -> set[str]:
    heavy = ("torch", "ortools", "mosaic._C", "matplotlib", "rich", "sklearn", "transformers", "cuda", "pynvml")
    code = f"""import sys
{after}
known = set(sys.modules)
{statement}
print(*(name for name in {heavy} if name in set(sys.modules) - known))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_mosaic_loads_nothing_heavy():
    assert loaded_by("import mosaic") == set()


def test_planning_data_needs_no_torch():
    assert loaded_by("import mosaic.plan, mosaic.profile, mosaic.timeline, mosaic.cost") == set()


def test_looking_at_checkpoints_needs_no_torch():
    assert loaded_by("import mosaic.checkpoint.folder, mosaic.checkpoint.manifest") == set()
    assert "torch" not in loaded_by("import mosaic.cli.checkpoints")


def test_planning_needs_no_torch():
    assert "torch" not in loaded_by("import mosaic.solver")


def test_tuning_a_pipeline_and_planning_its_next_step_needs_no_torch():
    assert loaded_by("import mosaic.pipelining.tuning.tune, mosaic.pipelining.next_step.planner") == set()


def test_planning_context_needs_no_torch():
    assert loaded_by("import mosaic.context, mosaic.context.drawn, mosaic.context.layout") == set()


def test_the_launcher_of_daily_retraining_loads_no_torch():
    assert loaded_by("import mosaic.retrain.run, mosaic.retrain.steering, mosaic.cli.retrain") & {"torch"} == set()


def test_the_engine_loads_torch_but_neither_solver_nor_pictures():
    assert loaded_by("import mosaic.engine", after="import torch") == set()


def test_public_names_are_frozen():
    assert mosaic.__all__ == [
        "Device",
        "Edge",
        "Handle",
        "ModuleGraph",
        "ModuleNode",
        "MosaicError",
        "Options",
        "Plan",
        "Profile",
        "RankSettings",
        "TrialSettings",
        "__version__",
        "colocate",
        "load",
        "parallel",
        "pipeline",
        "plan_from_quotas",
    ]
    assert all(getattr(mosaic, name) is not None for name in mosaic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mosaic.nothing  # noqa: B018


PACKAGES_WITH_CIRCLES: tuple[str, ...] = ()
"""Packages whose own modules still import each other in a circle, for checking types included; none should."""


def module_name(place: str) -> str:
    return "mosaic." + place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_no_files_import_each_other_in_a_circle():
    names = {module_name(place): path for place, path in sources()}
    imported = {name: imports(path) & names.keys() - {name} for name, path in names.items()}
    packages = {name for name, path in names.items() if path.name == "__init__.py"}
    for name, found in imported.items():  # a package is imported for what it gives out; its modules do not wait for it
        imported[name] = {other for other in found if not (other in packages and name.startswith(f"{other}."))}
    known = [{name for name in names if name.startswith(home)} for home in PACKAGES_WITH_CIRCLES]
    strange = [circle for circle in circles(imported) if not any(circle <= home for home in known)]
    assert strange == []


def circles(imported: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected sets of more than one module."""
    reached: dict[str, set[str]] = {}
    for name in imported:
        seen, todo = set(), [name]
        while todo:
            for other in imported[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reached[name] = seen
    sets = [{name, *(other for other in seen if name in reached[other])} for name, seen in reached.items()]
    return [one for index, one in enumerate(sets) if len(one) > 1 and one not in sets[:index]]
