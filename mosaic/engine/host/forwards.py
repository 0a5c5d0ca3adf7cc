"""Forwards on lanes whose results nobody may ever use: what they raise must not be lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mosaic.errors import UnforeseenError

if TYPE_CHECKING:
    from mosaic.backends.base import Ticket

_MAX_UNSEEN = 256


class Forwards:
    """Those that have not been seen to end well.

    Args:
        wait: Waits for a ticket, and raises what its work raised.

    Attributes:
        looks_early: Whether what has failed is raised at the next call already, wherever the program is by then.
    """

    def __init__(self, wait: Callable[[Ticket[Any]], Any]) -> None:
        self.looks_early = True
        self._wait = wait
        self._unseen: deque[Ticket[Any]] = deque()

    def note(self, ticket: Ticket[Any]) -> None:
        """Adds one, and looks at those that have ended."""
        self._unseen.append(ticket)
        while self._unseen and ((self.looks_early and self._unseen[0].done) or len(self._unseen) > _MAX_UNSEEN):
            self._wait(self._unseen.popleft())

    def check(self) -> None:
        """Waits for all of them and raises what they raised."""
        while self._unseen:
            self._wait(self._unseen.popleft())

    def told(self, error: BaseException) -> None:
        """Drops those that ended well, or with an error that has been raised; all have ended."""
        self._unseen = deque(ticket for ticket in self._unseen if _error_of(ticket) not in (None, error))

    def unforeseen(self) -> UnforeseenError | None:
        """Returns the first ``UnforeseenError`` that nobody has been told of, or None; all have ended."""
        errors = map(_error_of, self._unseen)
        return next((error for error in errors if isinstance(error, UnforeseenError)), None)

    def forget(self) -> None:
        """Drops all of them."""
        self._unseen.clear()


def _error_of(ticket: Ticket[Any]) -> BaseException | None:
    """Returns what finished work raised."""
    try:
        ticket.wait()
    except BaseException as error:
        return error
    return None
