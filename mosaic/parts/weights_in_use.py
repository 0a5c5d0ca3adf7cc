"""Weights that several threads compute with at a time, or that one thread alone replaces for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WeightsInUse:
    """Many threads use the weights at a time; one that replaces them waits for these, and later ones wait for it.

    A thread that uses them may begin to use them again inside, and replace them: it counts as no user meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_users = 0
        self._num_replacing = 0  # with those that wait to
        self._own = _Depth()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A block that computes with the weights."""
        with self._changed:
            while self._num_replacing and not self._own.depth:
                self._changed.wait()
            self._num_users += 1
        self._own.depth += 1
        try:
            yield
        finally:
            self._own.depth -= 1
            with self._changed:
                self._num_users -= 1
                if not self._num_users:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block that replaces weights, and puts them back."""
        with self._changed:
            self._num_replacing += 1
            self._num_users -= self._own.depth
            self._changed.notify_all()
            while self._num_users:
                self._changed.wait()
            try:
                yield  # the lock stays taken, so that one thread at a time is here
            finally:
                self._num_users += self._own.depth
                self._num_replacing -= 1
                self._changed.notify_all()


class _Depth(threading.local):
    """How often the present thread is inside ``shared``."""

    depth = 0
