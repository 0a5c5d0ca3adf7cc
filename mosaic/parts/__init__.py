"""Ranges of layers of unmodified models: find where a model can be cut, and run one chunk of it.

A chunk calls the user's whole model. Its own layers and modules are real; all others let their input through, return
zeros, or return what the chunk before has sent; behind the last own one the call is left.
"""
