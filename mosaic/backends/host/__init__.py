"""Pinned threads on the cores of this machine."""

from mosaic.backends.host.backend import HostBackend, available_cores, cpu_name

__all__ = ["HostBackend", "available_cores", "cpu_name"]
