"""The study of ranks at sizes that take a moment."""

from __future__ import annotations

from bench.ranks.launch import on_ranks
from bench.ranks.links import links
from bench.ranks.simulated import scaling


def test_rows_between_two_ranks_are_measured_and_predicted():
    sources = {figure.name: figure.source for figure in on_ranks(links, 2, 120)}
    assert sources["rows of 64 KiB from 2 ranks to one, ms"] == "measured"
    assert sources["rows of 64 KiB from 2 ranks to one, predicted, ms"] == "predicted"


def test_planners_steps_stand_over_that_of_auto():
    figures = {
        figure.name: figure for figure in scaling(model="clip-tiny", num_devices=(2,), seconds=0.2, figure="Fig. 9")
    }
    assert figures["auto: step over auto's, clip-tiny, 2 GPUs, ratio"].value == 1
    assert figures["distmm: step over auto's, clip-tiny, 2 GPUs, ratio"].labels["paper"] == "1.10 to 1.42"
