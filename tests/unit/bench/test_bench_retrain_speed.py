"""The study of a day's cost over a bare loop's, at sizes that take a moment."""

from __future__ import annotations

import subprocess
import sys

from bench.retrain.steps import LOST, RATIO


def test_steps_of_both_loops_are_compared_with_saves_and_without():
    code = "from bench.retrain.steps import *; [print(f.name, len(f.samples), f.value, sep='|') for f in " + (
        "steps(workers=0, rounds=5, block=2, rows=1)]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    lines = (line.split("|") for line in done.stdout.splitlines())
    found = {name: (int(count), float(value)) for name, count, value in lines}
    counted = [found[name.format(workers=0)][0] for name in (RATIO, LOST) if name.format(workers=0) in found]
    assert sum(counted) == 4  # which blocks have a checkpoint, the clock decides
    assert all(value > 0 for name, (_, value) in found.items() if "ratio" in name)
