"""Ranks that run pipelines, and what goes wrong between them."""
