"""Checkpoints of a model and what stands beside it: safetensors and JSON, whole on the disk, read under any plan."""
