"""A rank that has failed sends no more messages: they would meet those of another call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mosaic.ranks.world.progress import RankProgress

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


class InStep:
    """Routed calls of one rank, which keep step with those of the others.

    Args:
        progress: Where this rank is; told of a failure.

    Attributes:
        ranked: The modules.
    """

    def __init__(self, progress: RankProgress) -> None:
        self.ranked: dict[str, Ranked] = {}
        self.progress = progress
        self._failure: BaseException | None = None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around work that exchanges messages: once some of it has failed, none follows, and other ranks hear of it.

        Raises:
            BaseException: What failed first.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = error
                error.add_note("this rank is out of step with the others since; start all of them again")
                self.progress.fail(error, [group for ranked in self.ranked.values() for group in ranked.groups])
            raise
