"""A CUDA runtime without a GPU: streams that run on the CPU and tell which work is ordered after which."""

from fake_streams.collectives import FakeNccl
from fake_streams.driver import FakeGreenDriver
from fake_streams.runtime import FakeStreams, Hold, Launch, RaceError

__all__ = ["FakeGreenDriver", "FakeNccl", "FakeStreams", "Hold", "Launch", "RaceError"]
