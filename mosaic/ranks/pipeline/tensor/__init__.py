"""Layers that several ranks share: ``styles`` says which matrices are split, ``slices`` splits them.

Each rank has its own slice of a matrix, as a plain parameter under its name, so that optimizers, clipping, scalers and
buckets of gradients find what they know. torch's DTensor carries activations between the ranks, and their gradients.
"""
