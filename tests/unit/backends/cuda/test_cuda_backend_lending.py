"""``CudaBackend`` lends and takes back: when the driver fails, Ctrl-C comes, lanes are let go, threads come at once."""

from __future__ import annotations

from typing import Any

import pytest
from fake_streams import FakeGreenDriver, FakeStreams

from mosaic.backends.cuda.backend import CudaBackend


def test_an_interrupt_while_a_layout_is_made_does_not_shift_the_layouts_after_it(
    driver: FakeGreenDriver, runtime: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    backend = CudaBackend(api=runtime, driver=driver)
    backend.open_lanes([(0,)]).close()
    add_layout = driver.pools[0].add_layout

    def interrupted(layout: Any) -> Any:
        add_layout(layout)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver.pools[0], "add_layout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.open_lanes([(1,)])
    monkeypatch.setattr(driver.pools[0], "add_layout", add_layout)
    with backend.open_lanes([(2, 3)]) as lanes:
        assert [(record.slots, record.sm_ids) for record in lanes.partitions] == [((2, 3), tuple(range(16, 32)))]
        assert lanes.lane((2, 3)).num_sms == 16


def test_lanes_may_be_let_go_in_the_middle_of_borrowing(
    driver: FakeGreenDriver, runtime: FakeStreams, monkeypatch: pytest.MonkeyPatch
):
    """As the garbage collector may do, on the same thread."""
    backend = CudaBackend(api=runtime, driver=driver)
    old = [backend.open_lanes([(0,)])]
    lend = driver.pools[0].lend

    def lend_and_let_go(*arguments: Any, **options: Any) -> int:
        while old:
            old.pop()
        return lend(*arguments, **options)

    monkeypatch.setattr(driver.pools[0], "lend", lend_and_let_go)
    with backend.open_lanes([(0,), (1,)]):
        assert old == []
        assert driver.num_lent == 2
    assert driver.num_lent == 0
