"""Partition of layers over ranks, and sizes of sub-microbatches."""
