"""Which rank is at fault, and what to tell people about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from mosaic.ranks.meeting.progress import Whereabouts
from mosaic.ranks.meeting.roll import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a run of several ranks cannot go on."""

    ranks: tuple[int, ...]
    """Those at fault; empty if it is none of them."""
    text: str
    """A sentence that names them, without a full stop."""

    def to_json(self) -> str:
        """Returns it for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Verdict:
        """Reads what ``to_json`` wrote."""
        raw = json.loads(text)
        return Verdict(ranks=tuple(raw["ranks"]), text=raw["text"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank said of itself."""

    number: int
    """Counts up; a rank whose number stands still is stopped, cut off, or holds its interpreter."""
    time_s: float
    """Its clock's ``time.time()`` then."""
    where: Whereabouts
    """Where it was."""

    def to_json(self) -> str:
        """Returns it for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Beat:
        """Reads what ``to_json`` wrote."""
        raw = json.loads(text)
        return Beat(number=raw["number"], time_s=raw["time_s"], where=Whereabouts(**raw["where"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A rank that has left the loop: it took its handle away, or its program ended."""

    calls: int
    """Calls of the model that it had begun."""
    steps: int
    """Backwards that it had done."""
    error: str
    """Why it could not begin; empty for one that left in the ordinary way."""

    def to_bytes(self, length: int) -> bytes:
        """Returns it as bytes of a fixed length; a long error is cut."""
        text = json.dumps(asdict(self))
        if len(text) > length:
            text = json.dumps(asdict(replace(self, error=self.error[: length // 8])))
        return text.encode().ljust(length)

    @staticmethod
    def parse(content: bytes) -> Departure:
        """Reads what ``to_bytes`` wrote."""
        return Departure(**json.loads(content))


def killed(rank: Identity, seen: Beat, now_s: float) -> Verdict:
    """Says that a rank's process has gone."""
    return Verdict(
        ranks=(rank.rank,),
        text=f"{rank} has ended without a word: it was killed, or it crashed; it was last seen "
        f"{max(0.0, now_s - seen.time_s):.1f} s before, {_where(seen)}",
    )


def failed(rank: Identity, error: str, where: Whereabouts) -> Verdict:
    """Says that a rank's program ended with an error."""
    return Verdict(ranks=(rank.rank,), text=f"{rank} failed in {_in(where)}: {error}")


def interrupted(rank: Identity, where: Whereabouts) -> Verdict:
    """Says that somebody interrupted a rank."""
    return Verdict(ranks=(rank.rank,), text=f"{rank} was interrupted (Ctrl-C) in {_in(where)}")


def departed(rank: Identity, left: Departure) -> Verdict:
    """Says that a rank is no longer there for what others still do."""
    if left.error:
        return Verdict(ranks=(rank.rank,), text=f"{rank} could not begin: {left.error}")
    return Verdict(
        ranks=(rank.rank,),
        text=f"{rank} has left the loop after {left.calls} calls of the model and {left.steps} backwards, and others "
        "go on; give all ranks the same number of batches, and have all of them call what needs all ranks",
    )


def store_gone(holder: Identity | None) -> Verdict:
    """Says that the store is gone, and with it whoever held it."""
    if holder is None:
        return Verdict(ranks=(), text="torchrun's agent, which holds the store, cannot be reached: it has ended")
    return Verdict(ranks=(holder.rank,), text=f"{holder}, which holds the store, cannot be reached: it has ended")


def late(
    ranks: Sequence[Identity], before: Mapping[int, Beat], after: Mapping[int, Beat], *, timeout_s: float
) -> Verdict:
    """Finds who is at fault where ranks have waited too long for each other.

    Args:
        ranks: All of them.
        before: What each said of itself, and
        after: what it said some beats later.
        timeout_s: How long they waited.
    """
    waited = f"after {timeout_s:g} s of waiting"
    silent = [one for one in ranks if after[one.rank].number == before[one.rank].number]
    if silent:
        each = "; ".join(f"{one}, last seen in {_in(after[one.rank].where)}" for one in silent)
        return Verdict(
            ranks=tuple(one.rank for one in silent),
            text=f"nothing is heard {waited} of {each}: it is stopped, cut off, or keeps its interpreter to itself",
        )
    busy = [one for one in ranks if after[one.rank].where.doing != "waiting"]
    if busy:
        each = "; ".join(f"{one}: {_for(after[one.rank])}" for one in busy)
        return Verdict(
            ranks=tuple(one.rank for one in busy),
            text=f"the others gave up on {each}; {waited}. If that is in order, raise timeout_s",
        )
    places = {(beat.where.module, beat.where.phase) for beat in after.values()}
    each = "; ".join(f"rank {one.rank}: {after[one.rank].where}" for one in ranks)
    if len(places) > 1:
        return Verdict(
            ranks=(),
            text=f"{waited} the ranks wait for each other in different places ({each}); call the modules, and "
            "their backwards, in the same order on all ranks",
        )
    return Verdict(
        ranks=(),
        text=f"{waited} all ranks are in one place ({each}): the network between them is slow or cut; "
        "raise timeout_s if it is slow",
    )


def _in(where: Whereabouts) -> str:
    return "its start" if where.is_start else str(where)


def _where(seen: Beat) -> str:
    return str(seen.where) if seen.where.is_start else f"in {seen.where}"


def _for(beat: Beat) -> str:
    return f"{beat.where} for {beat.where.for_s:.0f} s"
