"""Modules as lists of layers, and steps as microbatches with metadata."""
