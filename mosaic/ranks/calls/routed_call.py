"""One routed call on the host: its forward, its backward and its reduction, each a piece of work on its lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mosaic.engine.calls.caller import caller
from mosaic.engine.calls.hidden.hidden_state import HiddenState
from mosaic.engine.calls.signature import Arguments, OutputInfo, Signature
from mosaic.engine.calls.structure import flatten
from mosaic.engine.host.call import Call
from mosaic.errors import UnsupportedModelError
from mosaic.ranks.calls.passing import ForwardPass

if TYPE_CHECKING:
    from mosaic.engine.calls.placed_module import PlacedModule
    from mosaic.engine.host.executor import Executor
    from mosaic.ranks.calls.ranked import Ranked


class RunsRoutedCalls(Protocol):
    """The engine of a rank, as far as one call needs it."""

    executor: Executor
    """Runs work on the rank's lanes."""
    backward_begins: Callable[[], None]
    """To be called when the backward of a call is reached."""

    def in_step(self) -> AbstractContextManager[None]:
        """Takes the steps of the call in the order of all ranks."""


class RoutedCall(Call):
    """State of one call from its launch to the end of its backward."""

    def __init__(
        self,
        calls: RunsRoutedCalls,
        ranked: Ranked,
        site: PlacedModule,
        going: Callable[[list[Any]], ForwardPass],
        arguments: Arguments,
        signature: Signature,
        hidden: HiddenState | None,
    ) -> None:
        context = copy_context()

        def passing(*args: Any, **kwargs: Any) -> list[Any]:
            passed = context.run(going(flatten((args, kwargs))[0]).go)
            made = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in passed.made]
            return made if passed.token is None else [*made, passed.token]

        super().__init__(
            calls.executor, site, passing, arguments, signature, None, origin=caller(), parameters=(), hidden=hidden
        )
        self._calls = calls
        self._ranked = ranked

    def forward(self) -> list[torch.Tensor | None]:
        """Runs on the module's lane: takes all steps of the forward."""
        with self._calls.in_step():
            return super().forward()

    def _run_with_memory(self, run: Callable[..., Any], arguments: Arguments) -> tuple[list[Any], Any]:
        """Calls it once: a second try would send its messages twice."""
        return self._run_module(run, arguments)

    def backward(
        self, grads: Sequence[torch.Tensor | None], *, keep: bool, by_caller: bool
    ) -> list[torch.Tensor | None]:
        """Runs on the module's lane: takes all steps of the backward.

        All ranks return every gradient: this one may have none of the rows, and no rank waits for another here.
        """
        with self._calls.in_step():
            found = super().backward(grads, keep=keep, by_caller=by_caller)
        return [
            torch.zeros(size, dtype=dtype) if grad is None else grad.contiguous()
            for grad, (size, dtype) in zip(found, self._likes, strict=True)
        ]

    def launch_backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Hands the backward to the lane, and behind it the end of the reduction, for which no other work waits."""
        if not torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(self.site.anchor).node):
            raise UnsupportedModelError(
                f"torch.autograd.grad or backward(inputs=...) through {self.site.name!r} on several ranks: all ranks "
                "take part in a whole backward; call backward() and read .grad"
            )
        self._calls.backward_begins()
        executor, site = self.executor, self.site
        found = super().launch_backward(grads)
        running = executor.backwards.current()
        if self._ranked.reduces:
            running.launched.append(executor.submit(site, "reduction", self._reduce, ()))
        return found

    def _reduce(self) -> None:
        with self._calls.in_step():
            self._ranked.reduce()


def signature_of(ranked: Ranked, arguments: Arguments) -> Signature:
    """Returns what a call returns on this rank: the leaves of its result in a list, and its token behind them."""
    rows = ranked.rows_of(arguments.leaves)
    edges = tuple(range(len(arguments.differentiable)))
    wanted = [index for index, flag in enumerate(ranked.template.differentiable) if flag and arguments.state.grad]
    outputs: list[OutputInfo] = []
    leaves: list[Any] = []

    def add(like: torch.Tensor, differentiable: bool) -> None:
        leaves.append(len(outputs))
        outputs.append(OutputInfo(like=like, differentiable=differentiable, same_input=None))

    for index, leaf in enumerate(ranked.template.leaves):
        if isinstance(leaf, torch.Tensor):
            add(torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta"), index in wanted)
        else:
            leaves.append((leaf,))
    if wanted:
        add(torch.empty(0, dtype=ranked.template.leaves[wanted[0]].dtype, device="meta"), True)
    return Signature(
        outputs=tuple(outputs),
        spec=flatten([None] * len(leaves))[1],
        leaves=tuple(leaves),
        edges=edges,
        draws=0,
        drawing=None,
        obstacle=None,
        alone=None,
        recasts=False,
        writes_buffers=ranked.learned.writes_buffers,
    )
