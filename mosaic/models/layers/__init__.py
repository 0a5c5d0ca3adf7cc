"""Layers that the zoo's models are made of."""
