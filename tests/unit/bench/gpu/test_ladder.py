"""The ladder's verdicts: what each rung concludes from readings, good and bad ones."""

from __future__ import annotations

import subprocess
import sys

from bench import tables
from bench.gpu.ladder import RUNGS


def test_every_rung_is_a_function_that_asks_a_question_and_the_list_loads_no_torch():
    for rung in RUNGS.values():
        assert callable(rung.resolve())
        assert rung.asks.endswith("?")
    code = "import sys, bench.gpu.ladder; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tables.TOP, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
