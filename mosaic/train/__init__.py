"""Training that can be killed at any instant and goes on with the same bits: data by position, the loop, its state."""
