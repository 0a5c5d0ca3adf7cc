"""Routed calls of one rank, as far as host lanes and stream lanes run them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mosaic.engine.calls.placed_module import PlacedModule
from mosaic.ranks.calls.ranked import Ranked
from mosaic.ranks.parameters.gradients import GradientReducer, SumPlace
from mosaic.ranks.parameters.tied import Compute
from mosaic.ranks.world.progress import RankProgress
from mosaic.timeline import Span

if TYPE_CHECKING:
    from mosaic.engine.host.executor import Executor
    from mosaic.engine.streams.executor import StreamExecutor


class RoutedCalls:
    """Runs routed calls over the executor of one rank.

    Attributes:
        ranked: The modules.
    """

    executor: Executor | StreamExecutor

    def __init__(self, backward_begins: Callable[[], None], progress: RankProgress) -> None:
        self.ranked: dict[str, Ranked] = {}
        self.backward_begins = backward_begins
        self.progress = progress
        self._sites: dict[str, PlacedModule] = {}
        self._failure: BaseException | None = None

    def begin(self, ranked: Mapping[str, Ranked]) -> None:
        """Takes the modules."""
        raise NotImplementedError

    def compute(self, name: str, slots: tuple[int, ...]) -> Compute:
        """Returns what runs a module's own work on the lane of its slots."""
        raise NotImplementedError

    def call(
        self,
        ranked: Ranked,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_there: bool,
        waits: bool,
        obstacle: str | None = None,
    ) -> tuple[Any, torch.Tensor | None]:
        """Makes a call; returns its result and the token of its backward.

        Args:
            ranked: The module.
            run: Makes the module's own call.
            args: Its arguments.
            kwargs: Its named arguments.
            is_there: Whether this rank calls it, rather than taking part without rows.
            waits: Whether to wait for its forward, so that what it raises comes out here.
            obstacle: Why it has to run where it is made; None: nothing is known of any.
        """
        raise NotImplementedError

    def reach(self, site: PlacedModule) -> None:
        """Orders what the caller does next behind a module's forward."""
        raise NotImplementedError

    def place(self, slots: tuple[int, ...]) -> SumPlace:
        """Returns where a module's gradients are summed up."""
        return SumPlace()

    def whole_call(self) -> AbstractContextManager[None]:
        """Around the model's own call."""
        return nullcontext()

    def begin_backward(self, shared: Sequence[GradientReducer]) -> None:
        """Called when a backward begins, with the reducers of what modules share."""

    def end_backward(self) -> None:
        """Called when a backward has ended, before shared gradients are reduced."""

    def spans(self, origin_ns: int) -> tuple[Span, ...]:
        """Returns what ran on this rank's slots, in milliseconds since ``origin_ns``."""
        return self.executor.spans(origin_ns)

    @property
    def origin_ns(self) -> int:
        """The start of the oldest recorded piece of work."""
        return self.executor.origin_ns

    def clear_spans(self) -> None:
        """Forgets what ran so far."""
        self.executor.clear_spans()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around work that exchanges messages: once some of it has failed, none follows, and other ranks hear of it.

        Messages of a rank that has failed would meet those of another call.

        Raises:
            BaseException: The first failure.
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
