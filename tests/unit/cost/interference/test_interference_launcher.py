"""One thread launches for all modules of a device, whatever else they cost each other."""

from __future__ import annotations

import pytest

from mosaic.cost import NoInterference, SharedBandwidth, Sharing
from mosaic.cost.interference.launcher import OneLauncher, relaunched, without_launcher
from mosaic.profile import Phase

F = Phase.FORWARD


class Known:
    """Three modules."""

    def bandwidth(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        return 0.5

    def launch_ms(self, module: str, phase: Phase) -> float:
        return {"a": 2.0, "b": 3.0, "c": 1.0}[module]


UNAWARE = OneLauncher(NoInterference(), Known())
SHARED = SharedBandwidth({F: Sharing(pressure=1.0)}, Known())


def ends(form: OneLauncher, alone_ms: float, *beside: str) -> float:
    return alone_ms + form.extra_ms("a", F, quota=1, alone_ms=alone_ms, beside=[(name, 1) for name in beside])


def test_none_ends_before_one_thread_has_launched_all() -> None:
    assert ends(UNAWARE, 1.0) == 1.0
    assert ends(UNAWARE, 2.0, "b") == pytest.approx(5.0)
    assert ends(UNAWARE, 2.0, "b", "c") == pytest.approx(6.0)
    assert ends(UNAWARE, 8.0, "b", "c") == 8.0  # the GPU is slower than all of it


def test_the_longer_of_the_form_s_time_and_the_wait_for_the_last_launch_counts() -> None:
    both = OneLauncher(SHARED, Known())
    assert ends(both, 2.0, "b") == pytest.approx(5.0)
    assert ends(both, 4.0, "b") == pytest.approx(6.0)
    assert without_launcher(both) is without_launcher(SHARED) is SHARED
    assert relaunched(SHARED, like=SHARED) is SHARED
    assert ends(relaunched(SHARED, like=UNAWARE), 2.0, "b") == pytest.approx(5.0)


def test_launches_are_no_sum_over_pairs() -> None:
    alone = sum(ends(UNAWARE, 4.0, name) - 4.0 for name in "bc")
    assert ends(UNAWARE, 4.0, "b", "c") - 4.0 == pytest.approx(2.0) != alone
    assert not OneLauncher(SHARED, Known()).is_pairwise
