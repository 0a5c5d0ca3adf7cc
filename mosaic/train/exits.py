"""Exit codes of a training process. No torch."""

DONE = 0
"""The work is done."""
FAILED = 1
"""An error that a restart does not cure."""
QUARANTINED = 5
"""Today's data was quarantined, not trained on."""
OUT_OF_MEMORY = 71
"""Memory ran out; a restart may find more."""
LOADER_DIED = 72
"""A worker of the loader was killed; a restart may help."""
INTERRUPTED = 75
"""A signal came, or the window is over; the run resumes later (``EX_TEMPFAIL``)."""
