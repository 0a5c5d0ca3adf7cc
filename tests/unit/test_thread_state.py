"""What a lane takes over from the thread that gives it work."""

from __future__ import annotations

import pytest
import torch

from mosaic.engine.calls.thread_state import ThreadState


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_of_either_device_is_taken_over_and_left_as_it_was(device: str):
    torch.set_autocast_enabled(device, True)
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        state = ThreadState.capture()
    finally:
        torch.set_autocast_dtype(device, before)
        torch.set_autocast_enabled(device, False)
    assert state.autocast
    with state.applied():
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) is torch.bfloat16
    assert not torch.is_autocast_enabled(device)


def test_calls_under_another_autocast_are_other_calls():
    plain = ThreadState.capture()
    with torch.autocast("cpu", torch.bfloat16):
        cast = ThreadState.capture()
    assert plain != cast
    assert not plain.autocast
