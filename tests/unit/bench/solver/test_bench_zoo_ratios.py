"""Table 1 beside the zoo: the size ``table1`` has its ratios of operations, and its columns say what they are of."""

from __future__ import annotations

import pytest

from bench.solver.table_1 import BACKBONES, ENCODERS
from bench.solver.zoo_ratios import ROWS, STEP, counted, implied_tokens, printed, ratios, table_1_beside_the_zoo

KINDS = {kind.name: kind for kind in (*BACKBONES, *ENCODERS)}


@pytest.mark.parametrize("model", ["qwen3-vl", "unified-io-2", "ofasys"])
def test_the_size_table1_has_the_ratio_of_table_1(model: str):
    found = counted(model, "table1")
    theirs = ratios({row: printed(KINDS[row]) for row in ROWS[model]})
    for name, (operations, _) in ratios(found).items():
        assert operations == pytest.approx(theirs[name][0], rel=0.03)
    if model == "qwen3-vl":  # two operations a parameter and token of a forward, and attention
        assert found["qwen3vl_llm"].tera_flops == pytest.approx(STEP * 2 * 6.945e9 * 656 / 1e12, rel=0.05)


def test_the_study_prints_ours_beside_theirs():
    made = {one.name: one for one in table_1_beside_the_zoo(sizes=("table1",), zoo=("imagebind",))}
    for above, paper in (("vision", 4.01), ("audio", 2.01)):
        one = made[f"Table 1, imagebind_{above} over imagebind_text, imagebind-table1: ratio of operations"]
        assert one.value == pytest.approx(paper, rel=0.03)
        assert one.labels["paper"] == str(paper)
    text = made["Table 1, imagebind_text, imagebind-table1: operations of forward and backward, 10^12"]
    assert text.labels["paper"] == "1.04"
    assert text.source == "predicted"


@pytest.mark.parametrize(
    ("row", "tokens"),
    [("qwen3vl_llm", 512), ("uio2_llm", 512), ("imagebind_vision", 2304), ("imagebind_audio", 4096)],
)
def test_operations_as_printed_are_forward_and_backward_of_so_many_tokens(row: str, tokens: int):
    kind = KINDS[row]
    assert round(2 * STEP * printed(kind).parameters * tokens / 1e12, 2) == kind.tera_flops
    assert implied_tokens(kind) == pytest.approx(tokens, rel=0.003)
