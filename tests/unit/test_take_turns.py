"""Candidates that take turns for a fixed number of rounds."""

from __future__ import annotations

from mosaic.take_turns import take_turns


def test_every_other_round_is_in_reverse_order_and_samples_are_kept_by_round():
    order: list[str] = []
    runs = {name: lambda name=name: [order.append(name) or len(order)] for name in "ab"}
    assert take_turns(runs, range(3)) == {"a": [[1], [4], [5]], "b": [[2], [3], [6]]}
    assert "".join(order) == "abbaab"
