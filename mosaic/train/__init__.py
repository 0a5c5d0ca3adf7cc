"""Training that survives a kill at any instant with equal bits: data by position, the loop, its state."""
