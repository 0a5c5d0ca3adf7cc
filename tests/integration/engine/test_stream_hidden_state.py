"""State that a module reads besides its arguments, on streams: as in the plain loop, and no launch unordered."""

from __future__ import annotations

from functools import partial

import pytest
from hidden_state_cases import BETWEEN, CASES, EAGER, held_back, run_on_streams, shown, train

RUNS = [(case, True, False) for case in CASES] + [(case, False, True) for case in list(CASES)[::2]]


@pytest.mark.parametrize(("case", "in_sample", "graphs"), RUNS)
def test_what_is_done_around_a_call_is_seen_by_the_call(case: str, in_sample: bool, graphs: bool):
    run_on_streams(partial(shown, case, in_sample), train, graphs=graphs, captured=case not in EAGER)


@pytest.mark.parametrize(("case", "graphs"), [(case, number % 2 == 1) for number, case in enumerate(BETWEEN)])
def test_what_is_done_between_the_model_s_calls_is_seen_and_ordered(case: str, graphs: bool):
    run_on_streams(*BETWEEN[case], graphs=graphs, captured=not held_back(case))
