"""Ways of sharing a device that it does not have, or that depend on torch's version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mosaic.backends.host.backend import HostBackend
from mosaic.errors import BackendUnavailableError
from mosaic.microbench.sharing import variants
from mosaic.microbench.sharing.variants import open_variant


@pytest.mark.parametrize("kind", ["plain", "prioritised", "torch_contexts"])
def test_what_the_host_has_not_says_why(kind: str):
    with pytest.raises(BackendUnavailableError, match="cannot be had"):
        open_variant(kind, HostBackend(num_slots=2), (1, 1))


class Context:
    def __init__(self, *, num_sms: int = 0, sm_partition: Any = None, device_id: int | None = None) -> None:
        self.num_sms = num_sms or sm_partition

    @classmethod
    def create(cls, *, num_sms: int, device_id: int) -> Context:
        return cls(num_sms=num_sms)

    def Stream(self) -> int:  # noqa: N802
        return self.num_sms


class Splits:
    """Torch's partition where its driver may be too old."""

    works = True

    @classmethod
    def from_device(cls, device_id: int) -> Splits:
        return cls()

    def split(self, *, num_sms: list[int]) -> tuple[tuple[int, ...], None]:
        if not self.works:
            raise RuntimeError("needs 13.1")
        return tuple(num_sms), None


def test_torch_splits_where_it_can_and_otherwise_the_overlap_is_named(monkeypatch: pytest.MonkeyPatch):
    split = variants._split_by_torch
    contexts, note = split(SimpleNamespace(GreenContext=Context), (64, 68), 0)
    assert [context.num_sms for context in contexts] == [64, 68]
    assert "OVERLAP" in note
    newer = SimpleNamespace(GreenContext=Context, SMPartition=Splits)
    contexts, note = split(newer, (64, 68), 0)
    assert [context.num_sms for context in contexts] == [64, 68]
    assert "disjoint" in note
    monkeypatch.setattr(Splits, "works", False)
    _, note = split(newer, (64, 68), 0)
    assert "needs 13.1" in note
    assert "OVERLAP" in note


def test_a_torch_that_makes_no_context_is_a_reason():
    def refuse(**options: Any) -> None:
        raise RuntimeError("no green contexts today")

    with pytest.raises(BackendUnavailableError, match="no green contexts today"):
        variants._split_by_torch(SimpleNamespace(GreenContext=SimpleNamespace(create=refuse)), (8, 8), 0)
