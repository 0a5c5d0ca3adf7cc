"""Checkpoints of a colocated model: written by torch.distributed.checkpoint, kept whole on disk, read by any plan."""
