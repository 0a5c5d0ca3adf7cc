"""DESIGN section 3: imports point down, heavy libraries stay where they belong, public names are frozen."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mosaic

ROOT = Path(__file__).parents[2]
CORE = {
    *("artifact", "child", "device", "errors", "graph", "plan"),
    *("profile", "take_turns", "timeline", "user_file"),
}
"""The files beside the packages."""

LAYERS = [
    {"cost", "hardware", "simulate"},
    {"backends", "context", "find", "solver"},
    {"checkpoint", "models", "parts", "pipelining", "profiler"},
    {"engine", "glue"},
    {"ranks", "report"},
    {"colocate", "pipeline"},
    {"integrations", "microbench", "retrain"},
    {"demo"},
    {"cli"},
]
"""Packages by height. Those of one line never import each other, except in the first line: together they are one."""

HOMES = {
    "torch": {
        *("backends", "checkpoint", "colocate.py", "engine", "find", "glue", "models", "parts", "pipeline.py"),
        *("integrations", "profiler", "ranks"),
        *("cost/counting", "context/attention", "demo", "microbench"),
        *("retrain/worker", "cli/workload.py", "cli/counting.py"),  # run a user's model
    },
    "ortools": {"solver"},
    "mosaic._C": {"backends/cuda/driver.py"},
}
"""The packages and files that may import a library."""


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


def height(package: str) -> int:
    return next(index for index, line in enumerate([CORE, *LAYERS, {"__main__"}]) if package in line)


@pytest.mark.parametrize(("place", "path"), [pytest.param(*source, id=source[0]) for source in sources()])
def test_imports_point_down(place: str, path: Path):
    own = package_of(place)
    if own == "__init__":
        return
    others = {name.split(".")[1] for name in imports(path) if name.startswith("mosaic.")} - {own}
    others &= CORE.union(*LAYERS)
    together = next((line for line in (CORE, LAYERS[0]) if own in line), set())
    upward = {other for other in others - together if height(other) >= height(own)}
    assert not upward, f"{place} imports {sorted(upward)} from its own line or above"


def test_the_page_on_the_code_shows_layers_and_tree_as_they_are():
    _, layers, _, tree, *_ = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("```")
    lines = [set(re.findall(r"\w+", line)) for line in reversed(layers.strip().splitlines())]
    shown = lines[1:-1]  # without the core, and without commands and tests
    assert all(packages <= line for packages, line in zip(LAYERS[:-1], shown, strict=True))
    below = [line for line in tree.splitlines() if line.startswith("  ")]
    named = {name for line in below for name in re.findall(r"(?:^ +|(?<=/ ))(\w+)/", line)}
    assert named == {path.name for path in (ROOT / "mosaic").iterdir() if (path / "__init__.py").is_file()}
    assert all((ROOT / name).is_dir() for name in re.findall(r"^(\w+)/", tree, re.MULTILINE))


def test_every_package_has_a_place_in_the_layers():
    packages = {package_of(place) for place, _ in sources()} - {"__init__", "__main__"}
    assert packages <= CORE.union(*LAYERS)


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
    libraries = ("torch", "ortools", "mosaic._C", "matplotlib", "rich", "sklearn", "transformers", "cuda", "pynvml")
    code = f"""import sys
{after}
known = set(sys.modules)
{statement}
print(*(name for name in {(*libraries, "filelock")} if name in set(sys.modules) - known))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_mosaic_loads_nothing_heavy():
    assert loaded_by("import mosaic") == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import mosaic.plan, mosaic.profile, mosaic.cost, mosaic.solver",
        "import mosaic.pipelining.tuning, mosaic.pipelining.next_step, mosaic.context",
        "import mosaic.cli.checkpoints, mosaic.cli.retrain",
    ],
)
def test_planning_and_the_launcher_of_retraining_load_no_torch(statement: str):
    assert "torch" not in loaded_by(statement)


COLOCATED = """
import torch, mosaic
class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.left(x) + self.right(x)
mosaic.colocate(Towers(), sample=torch.ones(4, 8), options=mosaic.Options(cache=FOLDER))
"""


def test_a_colocated_model_loads_no_filelock_whose_audit_hook_would_slow_each_step(tmp_path: Path):
    assert "filelock" not in loaded_by(COLOCATED.replace("FOLDER", repr(str(tmp_path))))
    assert any(tmp_path.iterdir())  # measurements were kept


def test_public_names_are_frozen():
    assert " ".join(mosaic.__all__) == (
        "Device Edge Handle ModuleGraph ModuleNode MosaicError Options Plan PlannerOptions Profile RankSettings "
        "TrialSettings __version__ colocate load parallel pipeline plan_from_quotas"
    )
    assert all(getattr(mosaic, name) is not None for name in mosaic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mosaic.nothing  # noqa: B018


def module_name(place: str) -> str:
    return "mosaic." + place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_no_files_import_each_other_in_a_circle():
    names = {module_name(place): path for place, path in sources()}
    imported = {name: imports(path) & names.keys() - {name} for name, path in names.items()}
    packages = {name for name, path in names.items() if path.name == "__init__.py"}
    for name, others in imported.items():  # a package is imported for its names; its modules do not wait for it
        imported[name] = {other for other in others if not (other in packages and name.startswith(f"{other}."))}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError with the circle
