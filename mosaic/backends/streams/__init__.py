"""Lanes on streams of a CUDA runtime: launching, order and times."""
