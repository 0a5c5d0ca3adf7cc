"""What a module reads besides its arguments, on streams: as in the plain loop, and no launch unordered."""

from __future__ import annotations

from functools import partial

import pytest
from hidden_state_cases import BETWEEN, CASES, EAGER, held_back, run_on_streams, shown, train


@pytest.mark.parametrize(
    ("in_sample", "graphs"), [(True, False), (False, True)], ids=["launched, in the sample", "graphs, only in the loop"]
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_done_around_a_call_is_seen_by_the_call(case: str, in_sample: bool, graphs: bool):
    run_on_streams(partial(shown, case, in_sample), train, graphs=graphs, captured=case not in EAGER)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("case", BETWEEN)
def test_what_is_done_between_the_model_s_calls_is_seen_and_ordered(case: str, graphs: bool):
    run_on_streams(*BETWEEN[case], graphs=graphs, captured=not held_back(case))
