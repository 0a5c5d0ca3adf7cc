"""The handle that ``colocate`` returns on several ranks, with what needs all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from mosaic.engine.finding.find import Finding
from mosaic.engine.handle import Handle
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.trial.report import TrialReport
from mosaic.errors import ModuleContractError
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.ranks.calls.run import RankedRuns
from mosaic.ranks.meeting.progress import THE_LOOP
from mosaic.ranks.meeting.world import World
from mosaic.ranks.parameters.ownership import take_back
from mosaic.ranks.parameters.tied import Holdings
from mosaic.ranks.rows.sampler import Feed, RankSampler, rows_to_load
from mosaic.ranks.running import loops
from mosaic.ranks.running.trace import trace_of


class RankHandle(Handle):
    """A model that is colocated over several ranks.

    Its plan's device i is rank i. As long as it is there, ``torch.nn.utils.clip_grad_norm_`` and
    ``torch.amp.GradScaler`` see the gradients of all ranks where they are given parameters of the model.

    Attributes:
        world: The ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        finding: Finding,
        plan: Plan,
        *,
        profile: Profile | None,
        notes: tuple[str, ...],
        placed: PlacedPlan,
        world: World,
        holdings: Holdings,
        feeds: tuple[Feed, ...] = (),
        report: TrialReport,
    ) -> None:
        self.world = world
        self._holdings = holdings
        self._report = report
        self._feeds = feeds
        self._trains = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._is_whole = True
        notes = (*report.sentences, *notes)
        super().__init__(model, finding, plan, profile=profile, notes=notes, placed=placed)
        self._is_whole = False
        loops.enter(self)

    def _warn(self) -> None:
        if self.world.rank == 0:
            super()._warn()

    def metrics(self) -> dict[str, float]:
        """Returns what ``Handle.metrics`` does, and what this rank sent to others since ``clear_timeline()``.

        ``sent_bytes/forward/NAME`` are rows of a module's arguments and results, ``sent_bytes/backward/NAME`` their
        gradients, and ``sent_bytes/reduce/NAME`` the gradients of its parameters that were reduced over its ranks.
        Where plans were tried at the start: ``trials``, ``trial_steps``, ``trial_lost_ms``, and the median step of each
        plan in ``trial_ms/PLAN``, measured on the slowest rank; there the optimizer has no part.
        """
        executor = self._executor
        sent = executor.traffic.metrics() if isinstance(executor, RankedRuns) else {}
        return {**super().metrics(), **self._report.metrics, **sent}

    def write_trace(self, folder: str | Path) -> Path:
        """Writes what this rank computed and waited for since ``clear_timeline()``; every rank calls it.

        ``mosaic doctor --trace FOLDER`` says from the files of all ranks which one is slow; each opens in
        ui.perfetto.dev, too. The last 20,000 pieces of work and waits are in it.

        Args:
            folder: Where to put ``trace-rankN.json``; ranks on several machines give one that all see, or copy files.

        Returns:
            The file of this rank.

        Raises:
            MosaicError: The folder cannot be written.
            RankFailedError: Another rank has failed; names it.
        """
        path = Path(folder) / f"trace-rank{self.world.rank}.json"
        trace_of(self.timeline().spans, self._origin_ns, self.world).write(path)
        return path

    @property
    def _origin_ns(self) -> int:
        return 0 if self._executor is None else self._executor.origin_ns

    def _make_ranks(self) -> World:
        return self.world

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm``; every rank calls it.

        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does the same.

        Returns:
            The norm before, a scalar; the same on every rank.
        """
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm, norm_type)

    def full_state_dict(self, copy: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Returns the plain model's ``state_dict``, whole, on every rank; every rank calls it.

        It is a copy; the plain model loads it.

        Args:
            copy: A copy of the model (``copy.deepcopy``), such as an average of its weights, to take instead.
        """
        model = self._model if copy is None else copy
        return {name: self._whole(name, tensor) for name, tensor in model.state_dict().items()}

    def sampler(
        self,
        data: Sized | int | Sampler[int],
        global_batch: int,
        *,
        least: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> RankSampler:
        """Returns what to give this rank's loader: ``DataLoader(data, batch_sampler=handle.sampler(data, 64))``.

        Args:
            data: The data set, or how many samples it has, or a sampler of indices that is the same on all ranks.
            global_batch: Rows of all ranks together.
            least: Rows that each rank loads in any case; torch's own ``collate_fn`` needs one.
            shuffle: Whether to draw another order each epoch.
            seed: Of the order; the same on all ranks.
            drop_last: Whether to leave out samples that make no whole batch.
        """
        shares = rows_to_load(global_batch, self.world.size, self._feeds, least=least)
        return RankSampler(data, shares, self.world.rank, shuffle=shuffle, seed=seed, drop_last=drop_last)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Raises ModuleContractError: a rank has only a part of the parameters, so there is no plain model to run."""
        if self._is_whole:
            with super().disabled():
                yield
            return
        raise ModuleContractError(
            "handle.disabled() is of no use on several ranks: a rank has only a part of the parameters; "
            "handle.remove(), on every rank, gives the plain model back, and handle.full_state_dict() a copy's weights"
        )

    def remove(self, *, gather: bool = True) -> None:
        """Gives the plain, whole model back; every rank calls it. Calling it again does nothing.

        It also ends the watch over other ranks, and tells them that this one is done. Parameters stay the same
        objects. An optimizer has no state yet for those that were not on its rank.

        Args:
            gather: Whether to bring the parameters together; False where other ranks may be gone.
        """
        loops.leave(self)
        try:
            super().remove()  # and raises what went wrong with the last checkpoint
        finally:
            if gather and not self._is_whole:
                self._is_whole = True
                take_back(self._model, self._whole)
            self.world.close()

    @property
    def _divided(self) -> frozenset[int]:
        """Ids of the parameters that some rank does not hold."""
        return frozenset(key for key, ranks in self._holdings.by_id.items() if len(ranks) < self.world.size)

    @property
    def _counted_here(self) -> dict[int, bool]:
        """For the id of each parameter of the model, whether this rank counts it: each is counted by one rank."""
        return {
            id(parameter): self._source_of(name) == self.world.rank
            for name, parameter in self._model.named_parameters()
        }

    def _before_call(self) -> None:
        changed = [name for name, parameter, trains in self._trains if parameter.requires_grad != trains]
        if changed and not self._is_whole:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ModuleContractError(
                f"{changed[0]}{more} trained, or did not, when the model was colocated, and now it is the other way: "
                "gradients are reduced of what trained then; handle.remove(), on every rank, and colocate it again"
            )

    def _source_of(self, name: str) -> int:
        """Returns the first rank that holds a tensor of the model."""
        return self._holdings.by_name.get(name, (0,))[0]

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor, with its values on the first rank that holds it."""
        device = self._holdings.devices.get(name, self.world.device)
        whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()
        with self.world.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast(whole, src=self._source_of(name), group=self.world.carrier_of(whole))
        return whole
