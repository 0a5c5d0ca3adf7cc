"""The words in which a case can end. Loads neither torch nor Mosaic."""

from __future__ import annotations

ON_LANES = "equal, on lanes"
NEAR = "equal within rounding"
"""On lanes of a GPU, whose libraries may choose other kernels there."""
IN_PLACE = "equal, in place"
REFUSED = "refused"
RAISED = "raised"
TOLD = "different, as told"
DIFFERENT = "different"
CRASHED = "crashed"
NO_PLAIN = "no plain loop"
"""The case says nothing about Mosaic: its plain loop fails, or differs from itself."""

EQUAL = "equal"
AS_TOLD = "equal, changed as told"
"""The model was refused, changed as the message says, and then equal."""

OUTCOMES = (ON_LANES, IN_PLACE, REFUSED, RAISED, TOLD, DIFFERENT, CRASHED)
"""Outcomes of a colocated case whose plain loop runs."""
CUDA_OUTCOMES = (ON_LANES, NEAR, *OUTCOMES[1:])
"""The same on lanes of a GPU."""
PIPELINE_OUTCOMES = (EQUAL, AS_TOLD, REFUSED, DIFFERENT, CRASHED)
"""Outcomes of a case whose model is cut into chunks."""
FAULTS = (DIFFERENT, CRASHED)
"""Those that break what Mosaic promises."""
