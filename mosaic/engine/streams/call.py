"""One call of a placed module on its lane's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.ranges import ProfilerRange
from mosaic.engine.calls.structure import map_tensors, version_of
from mosaic.engine.calls.thread_state import as_lane
from mosaic.engine.streams.order import LaneOrder, Point
from mosaic.engine.streams.tensor import StreamTensor, tagged
from mosaic.errors import ModuleContractError

if TYPE_CHECKING:
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.streams.held_state import HeldState
    from mosaic.engine.streams.timeline import StreamTimeline


class PlacedCall:
    """One call of a placed module, from its arguments to its tagged result.

    Args:
        order: The place of its lane in the order.
        site: The module.
        args: Its arguments; the lane is made to wait for those that lanes are computing.
        kwargs: Its named arguments.
        in_order: Whether it reads or writes more than its arguments, so that it has to keep to the order of the
            user's stream.
        held: What its module holds; None leaves that to the caller.
    """

    def __init__(
        self,
        order: LaneOrder,
        site: PlacedModule,
        args: Any,
        kwargs: Any,
        *,
        in_order: bool,
        held: HeldState | None = None,
    ) -> None:
        self._order = order
        self._site = site
        self._in_order = in_order
        self._held = held
        self._inputs: list[torch.Tensor] = []  # plain
        self._owners: dict[int, torch.Tensor] = {}  # by the id of the plain tensor: what the caller gave
        self._args = map_tensors(self._take, args)
        self._kwargs = map_tensors(self._take, kwargs)

    def launch(self, run: Callable[..., Any], timeline: StreamTimeline | None) -> Any:
        """Launches the module and returns its result, its tensors tagged with the lane; noted in a timeline, if any."""
        order, home, held, who = self._order, self._order.home, self._held, repr(self._site.name)
        plains = [given for given in self._owners.values() if type(given) is not StreamTensor]
        if held is not None:
            order.check_held(held, who)
        order.enter(ready=not self._in_order and all(home.is_ready(plain) for plain in plains) and self._was_there())
        if self._in_order:
            for other in {order, *(given.order for given in self._owners.values() if type(given) is StreamTensor)}:
                other.hold_back_writer(order.stream)
        order.seal()
        point = order.new_point()  # what it launches before it fails may still be running
        before = [version_of(tensor) for tensor in self._inputs]
        try:
            result, ticket = self._run(run)
        except BaseException:
            if held is not None:
                held.note_call()
            raise
        point.event = ticket.end
        if timeline is not None:
            timeline.note_forward(self._site, ticket)
            timeline.watch_backward(self._site, result, self._inputs)
        for plain in plains:
            home.api.record_use(plain, order.stream)
            order.note_read(plain, point, who)
        if held is not None:
            held.note_call()
            order.note_held(held, point, who)
        self._note_writes(before, point)
        tagged_result = self._tag(result, point)
        if self._in_order:
            order.lend()
            order.hold_user(home.api.current_stream(), point)
        order.settle()
        return tagged_result

    def _was_there(self) -> bool:
        return self._held is None or self._held.was_there()

    def _take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Orders the lane behind an input and returns it plain."""
        plain = tensor
        if type(tensor) is StreamTensor:
            plain = tensor.plain_for(self._order.stream)
        if id(plain) not in self._owners:
            self._owners[id(plain)] = tensor
            self._inputs.append(plain)
        return plain

    def _run(self, run: Callable[..., Any]) -> tuple[Any, Any]:
        made: list[Any] = []

        def work() -> None:
            with as_lane(), ProfilerRange(self._site.name, "forward"):
                made.append(run(*self._args, **self._kwargs))

        ticket = self._order.lane.launch(work, behind_caller=False)
        return made[0], ticket

    def _tag(self, result: Any, point: Point) -> Any:
        seen: dict[int, torch.Tensor] = {}

        def tag(tensor: torch.Tensor) -> torch.Tensor:
            found = self._owners.get(id(tensor))
            if found is None:
                found = seen.get(id(tensor))
            if found is None:
                found = seen[id(tensor)] = self._tag_new(tensor, point)
            return found

        return map_tensors(tag, result)

    def _tag_new(self, tensor: torch.Tensor, point: Point) -> torch.Tensor:
        """Tags a result; what is a view of an input stays with the lane of that input."""
        base = tensor._base if tensor._is_view() else None
        viewed = (t for t in self._inputs if base is not None and (base is t or (t._is_view() and base is t._base)))
        owner = next((self._owners[id(t)] for t in viewed), None)
        if owner is None:
            return tagged(tensor, point)
        if type(owner) is not StreamTensor:
            self._order.is_owing = True
            return tensor
        owner.order.wait_for_point(point)
        return tagged(tensor, owner.order.point())

    def _note_writes(self, before: list[int | None], point: Point) -> None:
        """Orders others behind what the module wrote into its inputs."""
        for tensor, version in zip(self._inputs, before, strict=True):
            if version_of(tensor) == version:
                continue
            given = self._owners[id(tensor)]
            if type(given) is not StreamTensor:
                self._order.is_owing = True
                continue
            if given.order.has_readers(besides=self._order.stream) and not self._in_order:
                raise ModuleContractError(
                    f"{self._site.name!r} wrote into an argument that other streams may still be reading; give it a "
                    f"copy, or leave it out: colocate(..., exclude=[{self._site.name!r}])"
                )
            given.order.wait_for_point(point)
            given.order.wrote(point if given.order is self._order else None)
