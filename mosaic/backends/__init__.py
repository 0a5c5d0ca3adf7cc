"""Backends: one protocol, and a package for each backend."""
