"""Measurements of SM partitioning: one file a question, on any backend."""
