"""The odd nets and loops of the sweep on a GPU: none different, none crashed."""

from __future__ import annotations

import pytest

from bench.sweep.catalogue import NETS, nets_of
from bench.sweep.device import on
from bench.sweep.tables import FAULTS
from bench.sweep.verdict import judge
from mosaic.backends.cuda.backend import CudaBackend

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LIMITS_OF_GRAPHS = ("autocast_around_the_whole_step",)
"""Told in docs/limits.md: a replay casts the weights that the plain loop keeps from its first step."""


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
@pytest.mark.parametrize("kind", NETS)
def test_nets_and_loops_of_a_kind_train_as_in_the_plain_loop(kind: str, graphs: bool, cuda_backend: CudaBackend):
    with on(cuda_backend.torch_device):
        cases = [case for case in nets_of(kind) if not (graphs and case.name in LIMITS_OF_GRAPHS)]
        ends = [list(judge(case, graphs=graphs))[-1] for case in cases]
    faults = [f"{end.labels['case']} {end.labels['outcome']}: {end.reason}" for end in ends]
    assert not [line for end, line in zip(ends, faults, strict=True) if end.labels["outcome"] in FAULTS]
