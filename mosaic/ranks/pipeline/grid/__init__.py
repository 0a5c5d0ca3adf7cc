"""Ranks as replicas of a pipeline: how they are laid out, and gradients of weights that several of them have."""
