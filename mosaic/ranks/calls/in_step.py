"""A rank that has failed sends no more messages: they would meet those of another call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


class InStep:
    """Routed calls of one rank, which keep step with those of the others.

    Attributes:
        ranked: The modules.
    """

    def __init__(self) -> None:
        self.ranked: dict[str, Ranked] = {}
        self._failure: BaseException | None = None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around work that exchanges messages: once some of it has failed, none follows.

        The other ranks' messages would meet those of another call. Where all ranks raised alike, before any rows moved,
        they are together still.

        Raises:
            BaseException: What failed first.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            if self._failure is None and not self._is_refused(error):
                self._failure = error
                error.add_note("this rank is out of step with the others since; start all of them again")
            raise

    def _is_refused(self, error: BaseException) -> bool:
        return any(one.refused is not None and one.refused() is error for one in self.ranked.values())
