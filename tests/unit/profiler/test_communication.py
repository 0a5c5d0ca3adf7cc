"""Latency and bandwidth of links, from measured messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks.cases import run_ranks

from mosaic.errors import BackendUnavailableError
from mosaic.profiler import measure_ring
from mosaic.profiler.communication import fit_link


def test_a_fit_finds_the_link_that_was_measured():
    points = [(steps, size, steps * 0.012 + size / 40e6) for steps, size in ((2, 1024), (2, 65536), (6, 1 << 22))]
    link = fit_link(points)
    assert (link.latency_us, link.gb_per_s) == pytest.approx((12.0, 40.0))


def test_one_rank_has_no_communication_to_measure():
    with pytest.raises(BackendUnavailableError, match=r"a torch\.distributed group of 2 or more"):
        measure_ring(torch.device("cpu"))


def test_two_ranks_measure_the_same_links(tmp_path: Path):
    first, second = run_ranks("ranks.programs.meeting.ring:measured", 2, tmp_path)
    assert first == second
    latency, bandwidth, to_one, to_one_bandwidth = first
    assert min(latency, to_one) >= 0
    assert min(bandwidth, to_one_bandwidth) > 0
