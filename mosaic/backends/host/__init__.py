"""Pinned threads on the cores of this machine."""

from mosaic.backends.host.backend import HostBackend

__all__ = ["HostBackend"]
