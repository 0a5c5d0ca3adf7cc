"""Libraries are told of lanes: in forward, in backward, in recomputation, and never for longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import SIDE_BY_SIDE, TwoTowers, pair_batch
from fake_streams import FakeGreenDriver, FakeStreams
from stream_cases import colocated
from torch import nn

from mosaic.backends.cuda.backend import CudaBackend
from mosaic.backends.streams import libraries as library_settings
from mosaic.backends.streams.libraries import LibrarySettings, Setting
from mosaic.engine import Handle

NUM_SMS = 132


class Libraries:
    """torch's carveout, and a cuBLAS with a handle for each thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.carveout: int | None = None
        self.targets: dict[int, int] = {}
        patch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: self.carveout)
        patch.setattr(torch._C, "_set_sm_carveout_experimental", lambda value: setattr(self, "carveout", value))
        properties = SimpleNamespace(multi_processor_count=NUM_SMS)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(library_settings, "current_cublas_handle", lambda device: threading.get_ident())
        patch.setattr(library_settings, "loaded_cublas", lambda: self)

    def cublasGetSmCountTarget(self, handle: Any, found: Any) -> int:  # noqa: N802
        found._obj.value = self.targets.get(handle.value, 0)
        return 0

    def cublasSetSmCountTarget(self, handle: Any, num_sms: Any) -> int:  # noqa: N802
        self.targets[handle.value] = num_sms.value
        return 0

    def seen(self) -> tuple[int | None, int]:
        """The settings of work that this thread launches now."""
        return self.carveout, self.targets.get(threading.get_ident(), 0)


ALONE = (None, 0)
TARGET = (NUM_SMS - 8, 8)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    made = Libraries(monkeypatch)
    library_settings._carveout.cache_clear()
    library_settings._cublas_target.cache_clear()
    yield made
    assert made.seen() == ALONE
    assert set(made.targets.values()) <= {0}


class Looking(nn.Module):
    """A tower that notes what holds in its forward and in its backward."""

    def __init__(self, libraries: Libraries, *, fails: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 16)
        self.fails = fails
        self.forwards: list[Any] = []
        self.backwards: list[Any] = []
        self._look: Callable[[], Any] = libraries.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards.append(self._look())
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self._back)
        return self.last(hidden)

    def _back(self, _: torch.Tensor) -> None:
        self.backwards.append(self._look())
        if self.fails:
            raise ZeroDivisionError


def tell(handle: Handle) -> None:
    executor: Any = handle._executor
    for lane in executor.lanes:
        lane.libraries = LibrarySettings(torch.device("cuda", 0))


def towers(libraries: Libraries, **options: Any) -> tuple[TwoTowers, Looking, Looking]:
    left, right = Looking(libraries), Looking(libraries, **options)
    return TwoTowers(left, right), left, right


# Settings.


def test_the_latest_that_runs_has_its_way_and_nothing_is_left_in_whatever_order_they_end():
    held = {"value": "before"}
    setting = Setting(lambda: held["value"], lambda value: held.update(value=value))
    one, other = setting.begin("one"), setting.begin("other")
    assert held["value"] == "other"
    one()
    assert held["value"] == "other"
    other()
    assert held["value"] == "before"
    held["value"] = "somebody else's"
    other()
    assert held["value"] == "somebody else's"
    outer, inner = setting.begin("outer"), setting.begin("inner")
    inner()
    assert held["value"] == "outer"
    outer()
    assert held["value"] == "somebody else's"


# Forward and backward of placed modules.


def test_forward_and_backward_of_a_lane_go_by_its_settings(libraries: Libraries):
    model, left, right = towers(libraries)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        for tower in (left, right):
            tower.forwards.clear()
            tower.backwards.clear()
        tell(handle)
        for _ in range(2):
            loss = model(*pair_batch()).square().mean()
            assert libraries.seen() == ALONE
            loss.backward()
            assert libraries.seen() == ALONE
    for tower in (left, right):
        assert (tower.forwards, tower.backwards) == ([TARGET] * 2, [TARGET] * 2)


def test_a_backward_that_fails_leaves_nothing_set(libraries: Libraries):
    model, _, right = towers(libraries)
    with colocated(model, pair_batch(), SIDE_BY_SIDE) as (handle, _):
        tell(handle)
        right.fails = True
        for _ in range(2):
            loss = model(*pair_batch()).square().mean()
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            assert libraries.seen() == ALONE


# The backend's choice.


def test_a_backend_tells_libraries_what_it_was_asked_to_of_all_its_lanes(libraries: Libraries):
    backend = CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(), sm_target=True)
    with backend.open_lanes([(0,), (1, 2)]) as lanes:
        assert lanes.lane((0,)).launch(libraries.seen).wait() == (NUM_SMS - 8, 8)
        assert lanes.lane((1, 2)).launch(libraries.seen).wait() == (NUM_SMS - 16, 16)
    with backend.open_plain_lanes([(0,)]) as plain:
        assert plain.lane((0,)).launch(libraries.seen).wait() == ALONE
