"""New data: its arrival, and its check before training."""
