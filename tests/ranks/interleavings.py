"""A model of ranks that run routed calls, and a search through all of its interleavings for one that blocks.

A *thread* is the loop's thread of a rank or the lane of a module on a rank. It has a fixed list of operations; what
may differ from run to run is which thread goes on next. The lists are made of the tables of
``mosaic.ranks.calls.steps``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mosaic.ranks.calls import steps
from mosaic.ranks.calls.steps import Step, WaitsFor


@dataclass(frozen=True)
class Case:
    """A layout and a program.

    Modules are numbered in the order of the program. All ranks make a step's forwards, then its backwards, the last
    first, and then wait for everything.
    """

    members: tuple[frozenset[int], ...]
    """For each module the ranks that run it."""
    num_ranks: int
    inputs: tuple[frozenset[int], ...]
    """For each module those before it whose results it takes."""
    missing: frozenset[tuple[int, int]] = frozenset()
    """Ranks and modules that they have no input for."""
    joins: frozenset[int] = frozenset()
    """Ranks whose loop waits for each result and each gradient where it is made."""
    # Faults.
    holds_slots: bool = False
    """Slots are held while a piece waits for messages."""
    shared_communicator: bool = False
    """All modules have one communicator."""
    skips: bool = False
    """A rank does not take part in calls that it has no input for."""
    forward_backwards: frozenset[int] = frozenset()
    """Ranks that make their backwards first module first."""


@dataclass
class Thread:
    rank: int
    ops: list[tuple[object, ...]] = field(default_factory=list)


class Ranks:
    """All threads of a case.

    Operations are: ``submit piece``, ``join piece``; ``meet communicator k step``; ``hold``, ``free``; ``post
    module``, ``collect module``.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        modules = range(len(case.members))
        self.loops = [Thread(rank) for rank in range(case.num_ranks)]
        self.lanes = {(rank, module): Thread(rank) for rank in range(case.num_ranks) for module in modules}
        self.ends: dict[tuple[int, int, str], int] = {}
        for rank in range(case.num_ranks):
            self._program(rank)
        self.threads = [*self.loops, *self.lanes.values()]
        self.number = {id(thread): index for index, thread in enumerate(self.threads)}
        self.lane_number = {key: self.number[id(thread)] for key, thread in self.lanes.items()}
        self.places: dict[tuple[int, int], dict[tuple[object, ...], list[int]]] = {}
        for key, thread in self.lanes.items():
            where: dict[tuple[object, ...], list[int]] = {}
            for place, op in enumerate(thread.ops):
                where.setdefault(op[:1], []).append(place)
            self.places[key] = where
        self.num_meetings = {
            key: [place for place, op in enumerate(thread.ops) if op[0] == "meet"] for key, thread in self.lanes.items()
        }
        self.num_posts = {
            key: [place for place, op in enumerate(thread.ops) if op[0] == "post"] for key, thread in self.lanes.items()
        }

    def _program(self, rank: int) -> None:
        case, loop = self.case, self.loops[rank]
        calls = [m for m in range(len(case.members)) if not (case.skips and (rank, m) in case.missing)]
        for module in calls:
            after = [("forward", m) for m in sorted(case.inputs[module]) if self._feeds(rank, m, module)]
            self._submit(rank, module, "forward", steps.FORWARD, after)
        backwards = calls if rank in case.forward_backwards else calls[::-1]
        for module in backwards:
            users = [m for m in calls if module in case.inputs[m] and self._feeds(rank, module, m)]
            self._submit(rank, module, "backward", steps.BACKWARD, [("backward", m) for m in users])
            if rank in case.members[module]:
                self._submit(rank, module, "reduction", steps.REDUCTION, [])
        loop.ops += [("join", rank, module, "backward") for module in calls]
        loop.ops += [("join", rank, m, "reduction") for m in calls if rank in case.members[m]]

    def _feeds(self, rank: int, source: int, target: int) -> bool:
        """Whether a module's call waits for another's."""
        return not {(rank, source), (rank, target)} & self.case.missing

    def _submit(
        self, rank: int, module: int, phase: str, table: tuple[Step, ...], after: list[tuple[str, int]]
    ) -> None:
        case, lane = self.case, self.lanes[rank, module]
        loop = self.loops[rank]
        loop.ops.append(("submit", rank, module, phase))
        lane.ops.append(("begin", len(loop.ops), tuple((rank, m, name) for name, m in after)))
        lane.ops += self._operations(rank, module, table)
        self.ends[rank, module, phase] = len(lane.ops)
        if rank in case.joins and phase != "reduction":
            loop.ops.append(("join", rank, module, phase))

    def _operations(self, rank: int, module: int, table: tuple[Step, ...]) -> Iterator[tuple[object, ...]]:
        case = self.case
        is_member = rank in case.members[module]
        holds = case.holds_slots and is_member and steps.COMPUTE in table
        if holds:
            yield ("hold",)
        for step in table:
            if step is steps.SHARE and not any(m == module for _, m in case.missing):
                continue
            if step.waits_for is WaitsFor.EVERYONE:
                if case.shared_communicator:
                    yield ("arrive",)
                yield ("meet", module, step.name)
            elif step.waits_for is WaitsFor.SLOTS and is_member and not holds:
                yield ("hold",)
                yield ("free",)
            elif step.starts_reduction and is_member:
                yield ("post",)
            elif step.waits_for is WaitsFor.MEMBERS and is_member:
                yield ("collect",)
        if holds:
            yield ("free",)


class Search:
    """Goes through the states of a case.

    Args:
        case: The case.
        everything: Try every thread that can go on in every state. Otherwise only those of which the order matters:
            an operation that can never be prevented again, and prevents no other, may as well come first, so that one
            such thread stands for all (a persistent set of one thread). What is left to choose is who holds slots, and
            who comes first on a communicator of several threads.

    Attributes:
        num_states: How many states there are.
        blocked: A state in which no thread can go on, with what each is stuck at; None if there is none.
    """

    def __init__(self, case: Case, *, everything: bool) -> None:
        self.ranks = Ranks(case)
        self._case = case
        self._everything = everything
        self.num_states = 0
        self.blocked: list[str] | None = None
        self._run()

    def _run(self) -> None:
        threads = self.ranks.threads
        start = ((0,) * len(threads), ((),) * self._case.num_ranks)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            self.num_states += 1
            places, orders = state
            able = [index for index in range(len(threads)) if self._can(index, places, orders)]
            if not able:
                if any(place < len(thread.ops) for place, thread in zip(places, threads, strict=True)):
                    self.blocked = [
                        f"rank {thread.rank}: {thread.ops[place]}"
                        for place, thread in zip(places, threads, strict=True)
                        if place < len(thread.ops)
                    ]
                    return
                continue
            if not self._everything:
                able = next(([i] for i in able if threads[i].ops[places[i]][0] not in ("hold", "arrive")), able)
            for index in able:
                following = self._after(index, places, orders)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)

    def _after(self, index: int, places: tuple[int, ...], orders: tuple[tuple[int, ...], ...]) -> tuple[object, ...]:
        thread = self.ranks.threads[index]
        if thread.ops[places[index]][0] == "arrive":
            row = (*orders[thread.rank], index)
            orders = (*orders[: thread.rank], row, *orders[thread.rank + 1 :])
        return (*places[:index], places[index] + 1, *places[index + 1 :]), orders

    def _can(self, index: int, places: tuple[int, ...], orders: tuple[tuple[int, ...], ...]) -> bool:
        ranks, thread, place = self.ranks, self.ranks.threads[index], places[index]
        if place == len(thread.ops):
            return False
        op = thread.ops[place]
        match op[0]:
            case "join":
                _, rank, module, phase = op
                return places[ranks.lane_number[rank, module]] >= ranks.ends[rank, module, phase]
            case "begin":
                _, submitted, after = op
                return places[thread.rank] >= submitted and all(
                    places[ranks.lane_number[piece[:2]]] >= ranks.ends[piece] for piece in after
                )
            case "hold":
                return not any(
                    self._holds(other, places[ranks.lane_number[key]])
                    for key, other in ranks.lanes.items()
                    if key[0] == thread.rank
                )
            case "meet":
                return self._meets(thread, place, places, orders, index)
            case "collect":
                return self._collects(thread, place, places)
        return True

    def _holds(self, lane: Thread, place: int) -> bool:
        done = lane.ops[:place]
        return done.count(("hold",)) > done.count(("free",))

    def _key(self, thread: Thread) -> tuple[int, int]:
        return next(key for key, lane in self.ranks.lanes.items() if lane is thread)

    def _meets(
        self,
        thread: Thread,
        place: int,
        places: tuple[int, ...],
        orders: tuple[tuple[int, ...], ...],
        index: int,
    ) -> bool:
        ranks, (_, module) = self.ranks, self._key(thread)
        mine = ranks.num_meetings[thread.rank, module].index(place)
        if not self._case.shared_communicator:
            for rank in range(self._case.num_ranks):
                meetings = ranks.num_meetings[rank, module]
                lane = ranks.lanes[rank, module]
                if mine >= len(meetings) or places[ranks.lane_number[rank, module]] < meetings[mine]:
                    return False
                if lane.ops[meetings[mine]] != thread.ops[place]:
                    return False  # another step: their messages do not fit
            return True
        ordinal = [i for i, who in enumerate(orders[thread.rank]) if who == index][mine]
        for rank in range(self._case.num_ranks):
            if ordinal >= len(orders[rank]):
                return False
            other = ranks.threads[orders[rank][ordinal]]
            nth = orders[rank][: ordinal + 1].count(orders[rank][ordinal]) - 1
            if other.ops[ranks.num_meetings[self._key(other)][nth]] != thread.ops[place]:
                return False
        return True

    def _collects(self, thread: Thread, place: int, places: tuple[int, ...]) -> bool:
        ranks, (_, module) = self.ranks, self._key(thread)
        nth = sum(op[0] == "collect" for op in thread.ops[:place])
        return all(
            places[ranks.lane_number[rank, module]] > ranks.num_posts[rank, module][nth]
            for rank in self._case.members[module]
        )
