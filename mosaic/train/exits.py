"""How a process that trains ends, as the process that started it sees it. No torch."""

DONE = 0
"""All that was asked for is done."""
FAILED = 1
"""Something is wrong that another start does not mend."""
QUARANTINED = 5
"""Today's data was not trained on."""
OUT_OF_MEMORY = 71
"""Memory ran out; another start may find more."""
LOADER_DIED = 72
"""A process that loads data was killed; another start may help."""
INTERRUPTED = 75
"""It was told to stop, or the window is over; it goes on later (``EX_TEMPFAIL``)."""
