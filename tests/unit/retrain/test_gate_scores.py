"""Scores of rows: how they are joined, kept, and paired."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mosaic import artifact
from mosaic.errors import InvalidFileError, MosaicError
from mosaic.retrain.gate import DayScores, GateSettings, Scores, digest_of_rows, joined, renewal
from mosaic.retrain.gate.scores import paired


def scores(version: str = "0042", **columns: object) -> Scores:
    return Scores.of(version, "frozen", "rows", {"value": [1.0, 0.0, 1.0], **columns})


def test_batches_are_joined_column_by_column():
    batches = [{"value": np.array([1.0, 0.0]), "site": ["n", "s"]}, {"value": [0.5], "site": ("n",)}]
    assert joined(batches) == {"value": [1.0, 0.0, 0.5], "site": ["n", "s", "n"]}
    assert joined([]) == {}


def test_batches_with_other_columns_are_refused():
    with pytest.raises(ValueError, match=r"\['value'\] for batch 1 and \['site', 'value'\] before"):
        joined([{"value": [1.0], "site": ["n"]}, {"value": [1.0]}])


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="value 2, site 1"):
        joined([{"value": [1.0, 0.0], "site": ["n"]}])
    with pytest.raises(ValueError, match="column 'site' has 1 entries for 3 rows"):
        scores(site=["n"])


def test_scores_without_values_are_refused():
    with pytest.raises(ValueError, match="it has to return a column 'value'"):
        Scores.of("0042", "frozen", "rows", {"accuracy": [1.0]})


def test_labels_may_be_numbers_and_values_may_be_missing():
    made = Scores.of("0042", "frozen", "rows", {"value": [True, None, math.inf], "label": np.array([3, 1, 3])})
    assert made.value == (1.0, None, None)
    assert made.columns == {"label": ("3", "1", "3")}
    assert made.num_invalid == 2


def test_scores_survive_their_file(tmp_path: Path):
    day = DayScores(scores=(scores(cluster=["a", "a", "b"], label=[1, 2, 3]), scores("0041", cluster=["a", "a", "b"])))
    artifact.save(day, tmp_path / "scores.json")
    assert artifact.load(DayScores, tmp_path / "scores.json") == day


def test_a_file_whose_columns_differ_in_length_is_refused():
    text = artifact.to_json(scores(site=["n", "s", "n"])).replace('"n",\n', "", 1)
    with pytest.raises(InvalidFileError, match="column 'site' has 2 entries"):
        artifact.parse(Scores, text, source="scores.json")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"row_digest": "others"}, "rows differ"),
        ({"value": (1.0,), "columns": {}}, "number of rows differ"),
        ({"cluster": ("a", "b", "c")}, "clusters differ"),
        ({"columns": {"site": ("s", "s", "s")}}, "columns differ"),
    ],
)
def test_only_the_same_rows_are_paired(other: dict[str, object], said: str):
    with pytest.raises(MosaicError, match=said):
        paired(scores(), replace(scores("0041"), **other))


def test_rows_are_named_by_their_list_and_its_order():
    assert digest_of_rows(["a", "b"]) == digest_of_rows(iter(["a", "b"]))
    others = [["b", "a"], ["ab"], ["a"], ["a", "b", ""], []]
    assert digest_of_rows(["a", "b"]) not in map(digest_of_rows, others)


def test_renewal_takes_whole_groups_whatever_their_values():
    settings = GateSettings(renew_rows=30, max_frozen_rows=100)
    groups = [f"shop {index // 10}" for index in range(100)]
    fresh = Scores.of("0042", "fresh", "f", {"value": [1.0] * 100, "cluster": groups})
    frozen = replace(fresh, rows="frozen", row_digest="r")
    found = renewal(frozen, fresh, "2026-11-22", settings)
    assert len(found.join) == len(found.leave) == 30
    assert all({index // 10 * 10 + k for k in range(10)} <= set(found.join) for index in found.join)
    assert found.join != found.leave
    worse = replace(fresh, value=(0.0,) * 100)
    assert renewal(frozen, worse, "2026-11-22", settings) == found
    assert renewal(frozen, fresh, "2026-11-23", settings) != found


def test_renewal_is_off_unless_asked_for_and_lets_none_leave_before_the_set_is_full():
    fresh = Scores.of("0042", "fresh", "f", {"value": [1.0] * 50})
    off = renewal(fresh, fresh, "2026-11-22", GateSettings())
    assert (off.join, off.leave) == ((), ())
    assert renewal(fresh, fresh, "2026-11-22", GateSettings(renew_rows=20)).leave == ()
