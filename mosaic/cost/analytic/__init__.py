"""Operators of a module counted without running them, on tensors that have a shape and no data."""
