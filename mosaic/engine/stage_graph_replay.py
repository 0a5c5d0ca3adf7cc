"""Launching a captured stage: where its static memory is written and read, and in which order."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any

from mosaic.engine.stage_graph_branch import GraphedBranch
from mosaic.engine.stage_graph_call import TakenCall
from mosaic.engine.stage_graph_module import Change


class CapturedStage:
    """One capture. Autograd nodes of results that are still in use keep their branch alive.

    Args:
        key: What calls must share to be replayed by it.
        forward: The graph of all forwards.
        branches: What each call's results and backward are made of.
    """

    def __init__(self, key: Hashable, forward: Any, branches: list[GraphedBranch]) -> None:
        self.key = key
        self._forward = forward
        self.branches = branches

    @property
    def in_flight(self) -> bool:
        """Whether a replay would overwrite what a backward still needs."""
        return any(branch.in_flight for branch in self.branches)

    def change(self) -> Change | None:
        """Returns how a module differs from what was captured, or None."""
        return next((c for branch in self.branches if (c := branch.state.change()) is not None), None)

    def replay(self, calls: Sequence[TakenCall]) -> Iterator[Any]:
        """Launches everything; yields the results.

        Each lane's stream is behind the caller's when it copies the inputs in, the graph is behind all lanes, and each
        lane is behind the graph when it copies the results out. So static memory has one user after another, on
        whatever streams this is called; and lanes keep their promises to those who share slots with them.
        """
        pairs = list(zip(self.branches, calls, strict=True))
        if len(pairs) == 1:
            branch, call = pairs[0]

            def whole() -> Any:
                branch.copy_in(call.tensors)
                self._forward.replay()
                return branch.results(call.tensors)

            yield branch.lane.launch(whole, timed=False).wait()
            return
        ready = [branch.lane.launch(partial(branch.copy_in, call.tensors), timed=False) for branch, call in pairs]
        for ticket in ready:
            ticket.wait()
        self._forward.replay()
        tickets = [branch.lane.launch(partial(branch.results, call.tensors), timed=False) for branch, call in pairs]
        for ticket in tickets:
            yield ticket.wait()

    def close(self) -> None:
        """Lets graphs and memory go; the device must have come to rest."""
        for branch in self.branches:
            branch.close()
        self._forward.reset()
