"""A rank that has failed sends no more messages: they would meet those of another call.

A call that cannot be routed is refused on all ranks, before any rows move, and they go on together. But they learn of
it at different calls: one rank where it makes the call, another on a lane while its loop is some calls ahead. So each
rank tells the others once of every module in each call of the model: of those that it does not come to any more, that
they cannot be called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.passing import ForwardPass

if TYPE_CHECKING:
    from mosaic.ranks.calls.ranked import Ranked


class InStep:
    """Routed calls of one rank, which keep step with those of the others.

    Attributes:
        ranked: The modules.
        told: Of which this rank has told the others, or a lane will, in this call of the model.
    """

    def __init__(self) -> None:
        self.ranked: dict[str, Ranked] = {}
        self.told: set[str] = set()
        self._given_up: set[str] = set()
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

    def begin_whole(self) -> None:
        """A call of the model begins."""
        self.told.clear()
        self._given_up.clear()
        for ranked in self.ranked.values():
            ranked.refused = None

    @property
    def first_refused(self) -> BaseException | None:
        """What was raised where a call of this call of the model was refused; None if none was that was made."""
        made = (one for name, one in self.ranked.items() if name not in self._given_up)
        errors = (one.refused() for one in made if one.refused is not None)
        return next((error for error in errors if error is not None), None)

    def give_up(self, ranked: Ranked) -> None:
        """Tells the others that a module cannot be called here, unless this rank has failed, of which they hear else.

        It was not called since an earlier call was refused.
        """
        self._given_up.add(ranked.name)
        if self._failure is None and ranked.routes:
            error = ModuleContractError(f"{ranked.name!r} is not called: a call before it was refused")
            with suppress(ModuleContractError), self.in_step():
                ForwardPass(ranked, ranked.plain, [], is_there=False, attributes="", error=error).agree()

    def give_up_rest(self) -> None:
        """Tells the others so of all modules of which they have not been told, in the order of all ranks."""
        for name, ranked in self.ranked.items():
            if name not in self.told:
                self.told.add(name)
                self.give_up(ranked)

    def _is_refused(self, error: BaseException) -> bool:
        return any(one.refused is not None and one.refused() is error for one in self.ranked.values())
