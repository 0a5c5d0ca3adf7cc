"""Parts of ``python -m bench.gpu``: what it looks for first, what it counts, and how results become tables."""

from __future__ import annotations

import subprocess
import sys

from bench import tables
from bench.gpu.parts import MEASUREMENTS, MODEL_NAMES
from mosaic import models


def test_the_process_that_starts_measurements_never_loads_torch():
    code = "import sys, bench.gpu.run; print(sorted({'torch', 'mosaic._C', 'mosaic.profiler'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_measurement_can_be_resolved_and_asks_a_question():
    for measurement in MEASUREMENTS.values():
        assert callable(measurement.resolve())
        assert measurement.asks.endswith("?")
        assert measurement.seconds > 0
    assert MODEL_NAMES == models.PAPER_MODELS


def test_all_of_it_fits_into_nine_minutes_with_the_build_and_the_ladder():
    assert sum(measurement.seconds for measurement in MEASUREMENTS.values()) <= 7.5 * 60
