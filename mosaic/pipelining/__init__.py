"""Pipelines of multimodal models, planned: simulated, searched, tuned and bounded, without torch and without a GPU."""
