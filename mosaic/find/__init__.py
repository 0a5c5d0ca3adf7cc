"""The tracer of a model's run, and notes about a model and its process: random numbers, settings, state to restore."""
