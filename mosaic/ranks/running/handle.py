"""The handle that ``colocate`` returns on several ranks, with what needs all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from mosaic.artifact import save
from mosaic.engine.handle import Handle
from mosaic.engine.session import Request
from mosaic.errors import ModuleContractError
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.parameters.elsewhere import take_back
from mosaic.ranks.running import loops
from mosaic.ranks.session import RankSession
from mosaic.ranks.world.world import World
from mosaic.timeline import RankTrace, Span


class RankHandle(Handle):
    """A model that is colocated over several ranks.

    Its plan's device i is rank i. As long as it is there, ``torch.nn.utils.clip_grad_norm_`` and
    ``torch.amp.GradScaler`` see the gradients of all ranks where they are given parameters of the model.

    Attributes:
        world: The ranks.
    """

    _session: RankSession

    def __init__(self, session: RankSession, *, world: World) -> None:
        self.world = self._ranks = world
        super().__init__(session, prepare=lambda request: session)
        self._trained = [(name, p, p.requires_grad) for name, p in self._model.named_parameters()]
        loops.enter(self)

    def _replan(self, request: Request) -> NoReturn:
        raise ModuleContractError(
            "replan() on several ranks, where parameters and the optimizer's state would move; call handle.save(), "
            "handle.remove() and mosaic.colocate() on every rank, and load the checkpoint: its tensors go to the ranks "
            "of the new plan"
        )

    def _log(self) -> None:
        if self.world.rank == 0:
            super()._log()

    def metrics(self) -> dict[str, float]:
        """Returns what ``Handle.metrics`` does, and the bytes that this rank sent since ``clear_timeline()``.

        ``sent_bytes/forward/NAME`` are rows of a module's arguments and results, ``sent_bytes/backward/NAME`` their
        gradients, and ``sent_bytes/reduce/NAME`` the gradients of its parameters that were reduced over its ranks.
        Trials are measured on the slowest rank, without an optimizer.
        """
        executor = self._executor
        sent = executor.sent_bytes.copy() if isinstance(executor, RankExecutor) else {}
        sent_bytes = {f"sent_bytes/{phase}/{name}": float(count) for (name, phase), count in sorted(sent.items())}
        return {**super().metrics(), **self._session.report.metrics, **sent_bytes}

    def write_trace(self, folder: str | Path) -> Path:
        """Writes what this rank computed and waited for since ``clear_timeline()`` to ``trace-rankN.json``.

        ``mosaic doctor --trace FOLDER`` says from the files of all ranks which one is slow. At most 20,000 pieces of
        work and waits are in one.

        Raises:
            MosaicError: The folder cannot be written.
        """
        world, path = self.world, Path(folder) / f"trace-rank{self.world.rank}.json"
        waits = (
            Span(module=module, phase=phase, slots=(), step=step, start_ms=start / 1e6, end_ms=end / 1e6)
            for module, phase, step, start, end in [*world.progress.waits]
            if phase != "agreement"  # that is of no step
        )
        spans = (*waits, *(() if self._executor is None else self._executor.log.spans()))
        host, run = world.me.host, world.run
        save(RankTrace(run=run, rank=world.rank, num_ranks=world.size, host=host, spans=spans), path)
        return path

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Does what ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does; every rank calls it."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type)

    def full_state_dict(self, copy: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Returns a copy of the plain model's ``state_dict``, whole, on every rank; every rank calls it.

        Args:
            copy: A copy of the model (``copy.deepcopy``), such as an average of its weights, to take instead.
        """
        model = self._model if copy is None else copy
        return {name: self._whole(name, tensor) for name, tensor in model.state_dict().items()}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Raises ModuleContractError: a rank has only a part of the parameters, so there is no plain model to run."""
        if not self._is_over:
            raise ModuleContractError(
                "handle.disabled() is of no use on several ranks: a rank has only a part of the parameters; "
                "handle.remove(), on every rank, gives the plain model back, and handle.full_state_dict() a copy's "
                "weights"
            )
        with super().disabled():
            yield

    def remove(self, *, gather: bool = True) -> None:
        """Gives the plain, whole model back; every rank calls it. Calling it again does nothing.

        Parameters stay the same objects. An optimizer has no state yet for those that were not on its rank.

        Args:
            gather: Whether to bring the parameters together, for which every rank must have memory; False where other
                ranks may be gone.
        """
        gather = gather and not self._is_over
        loops.leave(self)
        try:
            super().remove()  # and raises what went wrong with the last checkpoint
        finally:
            if gather:
                take_back(self._model, self._whole)
            self.world.close()

    @property
    def _divided(self) -> frozenset[int]:
        holders = self._session.placed.holdings.by_id
        return frozenset(key for key, ranks in holders.items() if len(ranks) < self.world.size)

    @property
    def _counted_here(self) -> dict[int, bool]:
        """For the id of each parameter of the model, whether this rank counts it: each is counted by one rank."""
        return {id(p): self._source_of(name) == self.world.rank for name, p in self._model.named_parameters()}

    def _before_call(self) -> None:
        changed = [name for name, parameter, trained in self._trained if parameter.requires_grad != trained]
        if changed and not self._is_over:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ModuleContractError(
                f"{changed[0]}{more} trained, or did not, when the model was colocated, and now it is the other way: "
                "gradients are reduced of what trained then; handle.remove(), on every rank, and colocate it again"
            )

    def _source_of(self, name: str) -> int:
        return self._session.placed.holdings.by_name.get(name, (0,))[0]

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        device = self._session.placed.holdings.devices.get(name, self.world.device)
        return self.world.copy_of(tensor, self._source_of(name), device)
