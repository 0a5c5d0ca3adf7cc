"""Which way rows take through a model's modules: home between two of them, or straight from one to the next.

A module's rows are laid out over its members so that few bytes travel: from where its arguments are, to where its
results go. Looked at are equal parts to which the fewest rows travel from home, or from the results of a module that it
takes. The first for every module, straight or not, never sends more than going home does: rows that go from one place
to another by way of a third travel no less. From there on one module after the other takes another if that is less for
all of them together. For a large batch this is found out on a small one that is cut alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from mosaic.ranks.rows.layout import RowLayout, Transfer

_MAX_KNOWN = 64
"""Batches of different rows whose layouts are remembered."""
_MAX_TRIED = 256
"""Rows of a batch on which ways are compared."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One module, as far as its rows' ways are concerned."""

    members: tuple[int, ...]
    """Ranks that run it."""
    home_bytes: float = 0.0
    """Of one row: its arguments that come from home and its results that go there, and their gradients."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """Modules whose results it takes straight, with the bytes of one row of these and of their gradients."""
    taken: Mapping[int, str] = field(default_factory=dict)
    """For each leaf of its arguments that comes straight the module that it comes from."""
    given: frozenset[int] = frozenset()
    """Leaves of its result that go straight to another module."""


class Ways:
    """The layouts of all modules.

    Args:
        stops: Modules by name, in the order of their calls.
    """

    def __init__(self, stops: Mapping[str, Stop]) -> None:
        self.stops = dict(stops)
        self._lock = threading.Lock()  # modules' lanes ask at the same time
        self._known: dict[tuple[int, ...], dict[str, RowLayout]] = {}
        self._transfers: dict[tuple[Hashable, Hashable, tuple[int, ...]], Transfer] = {}

    def layout(self, name: str, held: tuple[int, ...]) -> RowLayout:
        """Returns where a module's rows are on its members; the same on all ranks.

        Args:
            name: The module.
            held: Rows that each rank holds.
        """
        with self._lock:
            found = self._known.get(held)
            if found is None:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                found = self._known[held] = self._laid_out(held, self._bases(_sketch(held)))
        return found[name]

    def transfer(self, source: str | None, target: str, held: tuple[int, ...]) -> Transfer:
        """Returns the way of rows to a module: from another one, or from home where ``source`` is None."""

        def made() -> Transfer:
            before = RowLayout.home(held) if source is None else self.layout(source, held)
            return Transfer(before, self.layout(target, held))

        return self._known_transfer((source, target, held), made)

    def parts(self, members: tuple[int, ...], held: tuple[int, ...]) -> Transfer:
        """Returns the way of rows from home to equal parts on some ranks, for a call of which nothing goes straight."""
        home = RowLayout.home
        return self._known_transfer((None, members, held), lambda: Transfer(home(held), home(held).onto(members)))

    def _known_transfer(
        self, key: tuple[Hashable, Hashable, tuple[int, ...]], make: Callable[[], Transfer]
    ) -> Transfer:
        found = self._transfers.get(key)
        if found is None:
            found = make()
            with self._lock:
                if len(self._transfers) >= _MAX_KNOWN:
                    self._transfers.clear()
                self._transfers[key] = found
        return found

    def cost(self, held: tuple[int, ...], layouts: Mapping[str, RowLayout]) -> float:
        """Returns how many bytes travel in a step under given layouts."""
        home = RowLayout.home(held)
        return sum(
            stop.home_bytes * Transfer(home, layouts[name]).num_moved
            + sum(each * Transfer(layouts[s], layouts[name]).num_moved for s, each in stop.sources.items())
            for name, stop in self.stops.items()
        )

    def _laid_out(self, held: tuple[int, ...], bases: Mapping[str, str]) -> dict[str, RowLayout]:
        """Returns layouts of which some are made from a source's instead of from home."""
        home = RowLayout.home(held)
        found: dict[str, RowLayout] = {}
        for name, stop in self.stops.items():
            base = found[bases[name]] if name in bases else home
            found[name] = base.onto(stop.members)
        return found

    def _bases(self, held: tuple[int, ...]) -> dict[str, str]:
        """Returns which modules' parts are made from a source's."""
        every = {name: next(iter(stop.sources)) for name, stop in self.stops.items() if stop.sources}
        tried = [self._improved(held, start) for start in ({}, every)]
        return min(tried, key=lambda found: found[0])[1]  # the first of equals, on every rank

    def _improved(self, held: tuple[int, ...], bases: Mapping[str, str]) -> tuple[float, dict[str, str]]:
        """Returns the bytes and the bases that changes of one module at a time lead to."""
        best = self.cost(held, self._laid_out(held, bases))
        now = dict(bases)
        for name, stop in self.stops.items():
            for base in (None, *stop.sources) if stop.sources else ():
                others = {key: value for key, value in now.items() if key != name}
                tried = others if base is None else {**others, name: base}
                if tried != now and (cost := self.cost(held, self._laid_out(held, tried))) < best:
                    now, best = tried, cost
        return best, now


def _sketch(held: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a batch that is cut much like a large one, and small enough to try ways on."""
    total = sum(held)
    return held if total <= _MAX_TRIED else tuple(round(count * _MAX_TRIED / total) for count in held)
