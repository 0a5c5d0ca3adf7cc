"""Ranges of layers of unmodified models: find where to split a model, and run one chunk.

A chunk calls the user's whole model. Its own layers and modules are real; all others pass their input on, return zeros,
or return the tensors of the previous chunk; the call ends behind the last own one.
"""
