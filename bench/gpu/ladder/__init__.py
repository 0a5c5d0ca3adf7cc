"""The ladder: a minute on a GPU that says what holds there, before anything is measured.

Each rung is a process of its own, so none ends another, and leaves figures and a verdict in plain words. What a rung
does, and what it concludes (``judge_...``, from plain readings), stand side by side; this table loads neither torch nor
CUDA.
"""

from __future__ import annotations

from bench.gpu.parts import Measurement

CLOSE = 0.02
"""Relative difference that other kernels of the same operator may make in half precision."""
SM_TARGET_SPEEDUP = "speed-up by an SM target"
"""Name of the figure that ``mosaic/backends/cuda/sm_targets.json`` is made of."""
_ASKS = {
    "streams:device": "which device and versions are these, and how is it cut into slots?",
    "streams:events": "do events of the primary context order green streams, both ways, and tell times?",
    "streams:partitions": "do partitions run on disjoint SMs, as many as were granted?",
    "numbers:operators": "do common operators compute on a lane what they compute off it, forward and backward?",
    "numbers:convolutions": "does cuDNN run on a lane that it sees first?",
    "numbers:triton": "does a Triton kernel, such as torch.compile makes, run on a lane?",
    "streams:capture": "can a graph span two lanes, and does each half stay on its SMs?",
    "streams:products": "do matrix products on few slots gain from being told how many SMs they have?",
    "numbers:towers": "do two towers train side by side as they do one after the other, and do they overlap?",
    "numbers:dropout": "are random numbers right in graphs that run on two lanes in no order?",
}

RUNGS = {
    rung.name: rung
    for rung in (
        Measurement(
            name=f"first/{place.partition(':')[2].replace('_', '-')}",
            asks=asks,
            function=f"bench.gpu.ladder.{place}",
            seconds=5,
        )
        for place, asks in _ASKS.items()
    )
}
"""By name, from the ground up."""
