"""The ladder: tests the features of a GPU in a minute, before the measurements.

Each rung runs in its own process, and has figures and a verdict. The function of a rung and its conclusion
(``judge_...``, from readings) are side by side. This table loads neither torch nor CUDA.
"""

from __future__ import annotations

from bench.gpu.parts import Measurement

CLOSE = 0.02
"""Relative tolerance for different kernels of an operator in half precision."""
SM_TARGET_SPEEDUP = "speed-up by an SM target"
"""Name of the figure for ``mosaic/backends/cuda/sm_targets.json``."""
_ASKS = {
    "streams:device": "what are the device, its versions and its slots?",
    "streams:events": "do events of the primary context order green streams in both directions, and measure times?",
    "streams:partitions": "do partitions run on disjoint SMs, in the granted numbers?",
    "numbers:operators": "do common operators have the same results on a lane, forward and backward?",
    "numbers:convolutions": "does cuDNN work if it is first used on a lane?",
    "numbers:triton": "does a Triton kernel, as in torch.compile, run on a lane?",
    "streams:capture": "can a CUDA graph span two lanes, and does each half stay on its SMs?",
    "streams:products": "do matrix products on few slots gain from an SM target?",
    "numbers:towers": "do two towers side by side have the same results, and do they overlap?",
    "numbers:dropout": "are random numbers correct in unordered graphs on two lanes?",
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
"""Rungs by name, in order."""
