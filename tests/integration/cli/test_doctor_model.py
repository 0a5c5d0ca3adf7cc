"""``mosaic doctor --model``: what it cannot see through is named with the user's line, and trains as it did."""

from __future__ import annotations

import json
from pathlib import Path

import odd_models
import pytest
from engine_cases import run_both, train

from mosaic.cli.doctor import Diagnosis, examine_model
from mosaic.cli.main import run
from mosaic.engine import find_modules

FILE = Path(odd_models.__file__)


def line_of(name: str) -> str:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return f"{FILE}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# here: {name}'))} in "


def report_of(name: str) -> Diagnosis:
    return examine_model(f"{FILE}:make_{name}")


SEEN = {
    "Twice": "left: called 2 times in a step",
    "Writing": "left: its input is written to in place (add_",
    "Tied": "left: shares 0.weight with the rest of the model",
}
QUIET = ("Inside", "Reading")
"""In which there is nothing for their user to do."""


@pytest.mark.parametrize("name", SEEN)
def test_what_cannot_be_seen_through_is_named_with_its_line_and_what_to_do(name: str):
    results = [finding for finding in report_of(name).findings if finding.description.startswith(SEEN[name])]
    assert [finding.severity for finding in results] == ["warning"]
    assert line_of(name) in results[0].description
    assert results[0].remedy


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("name", [*SEEN, *QUIET, "Hooked", "Compiled"])
def test_such_a_model_trains_as_the_plain_one_does(name: str):
    model, sample = getattr(odd_models, f"make_{name}")()
    names = find_modules(model, sample).graph.names
    stages = [dict.fromkeys(names[:2], 1), *({name: 1} for name in names[2:])]
    described = run_both(type(model), sample, stages, train(6), on_lanes=name != "Compiled")
    assert all(f": {placed} on slot" in described for placed in names)
    assert name not in QUIET or not report_of(name).findings
    runs_in_place = name in ("Hooked", "Writing", "Tied", "Compiled")  # a hook counts in an attribute
    assert (" ran in place" in described) == runs_in_place
    if name in SEEN:
        assert line_of(name) in described


def test_a_model_that_cannot_be_colocated_is_refused_with_the_line():
    (elsewhere,) = report_of("Elsewhere").findings[:1]
    assert elsewhere.severity == "error"
    assert "is on meta, which the host backend does not support" in elsewhere.description
    (refusing,) = report_of("Refusing").findings
    assert "ValueError: no such modality" in refusing.description
    assert line_of("Refusing") in refusing.description


def test_the_command_writes_json_and_exits_with_1_only_where_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    where = tmp_path / "report.json"
    assert run(["doctor", "--model", f"{FILE}:make_Twice", "--json", str(where)]) == 0
    assert json.loads(where.read_text())["modules"] == {"right": []}
    assert line_of("Twice") in capsys.readouterr().out  # whole, however narrow the terminal
    assert run(["doctor", "--model", f"{FILE}:make_Refusing"]) == 1
    assert "cannot be colocated" in capsys.readouterr().err
