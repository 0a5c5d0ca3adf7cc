"""How ``bench.gpu`` measures a model: what comes first, what a failure costs, and the rule of thumb beside it."""

from __future__ import annotations

from itertools import takewhile

import pytest
from fake_streams import FakeGreenDriver, FakeStreams

from bench.gpu.bench import Bench
from bench.gpu.models import measure as gpu_models
from bench.gpu.models import variants as gpu_variants
from bench.gpu.models.measure import EVEN_VARIANTS
from mosaic.backends.cuda.backend import CudaBackend
from mosaic.microbench import Budget


def fake_backend() -> CudaBackend:
    return CudaBackend(api=FakeStreams(), driver=FakeGreenDriver(num_slots=4))


def test_every_kind_of_lanes_trains_as_the_plain_loop_does_and_without_a_race(monkeypatch: pytest.MonkeyPatch):
    backend, asked = fake_backend(), []

    def opened(ordinal: int, *, sm_target: bool, cudnn: bool) -> CudaBackend:
        asked.append(sm_target)
        return backend

    monkeypatch.setattr(gpu_variants, "CudaBackend", opened)
    bench = Bench(backend=backend, budget=Budget(), dry_run=True)
    with backend.api.watching():
        figures = gpu_models.measure_model(bench, name="clip", batch=2)
        found = list(takewhile(lambda figure: figure.name != "step_tflop", figures))
    differences = {f.labels["variant"]: f.value for f in found if f.name == "loss_difference"}
    assert list(differences) == list(EVEN_VARIANTS)
    assert max(differences.values()) < 1e-3
    assert asked == [False, False, True]
    (targeted,) = (f for f in found if (f.name, f.labels.get("variant")) == ("step_ms", EVEN_VARIANTS[-1]))
    assert targeted.labels["launching"] in ("eager", "captured")
