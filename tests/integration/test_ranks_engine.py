"""The engine of several ranks: what is sent, what overlaps, and how failures come out."""

from __future__ import annotations

from pathlib import Path

from ranks_cases import run_ranks

ROWS, IN, OUT = 3, 6 * 4, 8 * 4
"""Rows of a rank, and bytes of a row of the image tower's argument and result."""


def test_only_rows_that_travel_are_counted_as_sent(tmp_path: Path):
    first, second = run_ranks("ranks_engine:bytes_sent", 2, tmp_path)
    assert second["sent_bytes/forward/image"] == ROWS * IN
    assert first["sent_bytes/forward/image"] == ROWS * OUT
    assert second["sent_bytes/backward/image"] == ROWS * OUT
    assert "sent_bytes/backward/image" not in first, "raw inputs take no gradient"
    assert "sent_bytes/forward/backbone" not in first | second, "on both ranks, each with its own rows"
    assert first["sent_bytes/reduce/backbone"] == second["sent_bytes/reduce/backbone"] > 0
