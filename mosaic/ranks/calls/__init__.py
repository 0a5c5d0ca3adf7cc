"""Calls of modules that run on some of the ranks: on threads of the host, or on a GPU's streams."""
