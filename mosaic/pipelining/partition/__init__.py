"""Which layers run on which rank, and into which pieces microbatches are cut."""
