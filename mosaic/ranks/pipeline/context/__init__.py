"""Sequences that several ranks share in a pipeline: each runs the same layers on tokens of its own."""
