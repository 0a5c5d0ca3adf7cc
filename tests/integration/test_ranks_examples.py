"""Examples run on two ranks as they stand, and compute what DistributedDataParallel computes in their place."""

from __future__ import annotations

from pathlib import Path

from ranks_cases import run_ranks


def test_examples_run_on_two_ranks_unchanged(tmp_path: Path):
    told = run_ranks("ranks_examples:examples", 2, tmp_path)
    assert len(told[0]) >= 2
    for rank in told:
        for name, (losses, parameters, placed) in rank.items():
            half = "--precision amp " in f"{name} "  # float16 rounds by a thousandth
            assert losses < (5e-3 if half else 1e-4), name
            assert parameters < 2e-3, name
            assert len(placed) >= 3, name
    llava = next((found[2] for name, found in told[0].items() if "llava" in name), ["model.language_model"])
    assert "model.language_model" in llava
