"""The modules that are found in models of transformers, as a table that a person can look through.

``a + b > c`` says that a and b can run beside each other, and c after them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mosaic.engine import find_modules
from mosaic.engine.finding.find import Finding

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra [examples] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries' own
]

TABLE = Path(__file__).parents[3] / "golden" / "found_in_transformers.txt"


def levels(finding: Finding) -> str:
    depth: dict[str, int] = {}
    for name in finding.graph.topological_order():
        depth[name] = 1 + max((depth[before] for before in finding.graph.predecessors(name)), default=-1)
    at = [[name for name in finding.graph.names if depth[name] == level] for level in range(max(depth.values()) + 1)]
    return " > ".join(" + ".join(names) for names in at)


def lines(name: str, finding: Finding) -> Iterator[str]:
    yield f"{name}: {levels(finding)}"
    for module, reason in finding.left_out.items():
        yield f"    not {module}: {reason.partition(' (')[0]}"


def test_each_model_has_the_modules_that_a_person_would_place(tmp_path: Path):
    from transformers_models import MODELS, build

    found: list[str] = []
    for name in MODELS:
        model, batch = build(name)
        found += lines(name, find_modules(model, batch))
    (made := tmp_path / TABLE.name).write_text("\n".join(found) + "\n", encoding="utf-8")
    expected = TABLE.read_text(encoding="utf-8").splitlines()
    difference = "\n".join(difflib.unified_diff(expected, found, str(TABLE), str(made), lineterm="", n=0))
    assert len(MODELS) >= 40
    assert found == expected, difference
