"""Lock of weights that several threads use at a time, or that one thread replaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WeightsInUse:
    """A read-write lock: users share the weights; a thread that replaces them waits for all users.

    It is reentrant: a user may use the weights again inside, or replace them, and then does not wait for itself.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_users = 0
        self._num_replacing = 0  # including waiting ones
        self._own = _Depth()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock for computation with the weights."""
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
        """Holds the lock to replace weights temporarily."""
        with self._changed:
            self._num_replacing += 1
            self._num_users -= self._own.depth
            self._changed.notify_all()
            while self._num_users:
                self._changed.wait()
            try:
                yield  # with the lock held: one thread at a time
            finally:
                self._num_users += self._own.depth
                self._num_replacing -= 1
                self._changed.notify_all()


class _Depth(threading.local):
    """Nesting depth of ``shared`` in the current thread."""

    depth = 0
