"""The words in which a case can end. Loads neither torch nor Mosaic."""

from __future__ import annotations

ON_LANES = "equal, on lanes"
IN_PLACE = "equal, in place"
REFUSED = "refused"
RAISED = "raised"
TOLD = "different, as told"
DIFFERENT = "different"
CRASHED = "crashed"
NO_PLAIN = "no plain loop"
"""The case says nothing about Mosaic: its plain loop fails, or differs from itself."""

OUTCOMES = (ON_LANES, IN_PLACE, REFUSED, RAISED, TOLD, DIFFERENT, CRASHED)
"""How a case whose plain loop runs can end."""
FAULTS = (DIFFERENT, CRASHED)
"""Those that break what Mosaic promises."""
