"""A CUDA runtime without a GPU: streams that run on the CPU and tell which work is ordered after which."""

from fake_streams.runtime import FakeStreams, Launch, RaceError

__all__ = ["FakeStreams", "Launch", "RaceError"]
