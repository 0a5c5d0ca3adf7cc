"""Notes about a model and its process: random numbers, torch's settings, and the state to restore after a run."""
