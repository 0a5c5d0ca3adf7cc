"""The handle that ``colocate`` returns on several ranks, with what needs all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from mosaic.engine.finding.find import Sample
from mosaic.engine.handle import Handle
from mosaic.engine.session import Request, Session
from mosaic.errors import ModuleContractError, MosaicError
from mosaic.plan import Plan
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.parameters.elsewhere import take_back, tensors_of
from mosaic.ranks.parameters.tied import Members
from mosaic.ranks.rows.sampler import RankSampler, rows_to_load
from mosaic.ranks.running import loops
from mosaic.ranks.running.trace import computed_spans, trace_of
from mosaic.ranks.session import RankSession
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World


class RankHandle(Handle):
    """A model that is colocated over several ranks.

    Its plan's device i is rank i. As long as it is there, ``torch.nn.utils.clip_grad_norm_`` and
    ``torch.amp.GradScaler`` see the gradients of all ranks where they are given parameters of the model.

    Attributes:
        world: The ranks.
    """

    _session: RankSession
    _prepare: Callable[[Request], RankSession]

    def __init__(self, session: RankSession, prepare: Callable[[Request], RankSession], *, world: World) -> None:
        self.world = world
        super().__init__(session, prepare)
        loops.enter(self)

    def _begin(self, session: Session) -> None:
        self._trains = [(name, p, p.requires_grad) for name, p in self._model.named_parameters()]
        self._is_whole = True
        super()._begin(session)
        self._is_whole = False

    def replan(
        self,
        sample: Sample | None = None,
        *,
        reason: str,
        plan: Plan | str | Path | None = None,
        modules: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> None:
        """Plans anew as ``Handle.replan`` does; every rank calls it, with its own batch and the same changes made.

        The model is brought together on every rank, planned, and divided anew. What is new gets rank 0's weights.
        ``optimizer`` has to be given: the state of parameters that move to other ranks moves with them, and that of
        parameters that are given up is dropped. Gradients do not move, so there must be none: call it after
        ``optimizer.zero_grad()``. A sampler that was made before stays right; a new one knows what weighs most now.

        If planning fails, the handle is done as after ``remove()``, and all ranks raise: go on from a checkpoint. What
        is refused on any rank changes nothing on all of them.
        """
        if optimizer is None:
            raise ValueError(
                "replan() on several ranks needs optimizer=: state of parameters that move to other ranks moves with "
                "them; give the loop's optimizer, or all of them, or () for none"
            )
        super().replan(sample, reason=reason, plan=plan, modules=modules, exclude=exclude, optimizer=optimizer)

    def _replan(self, request: Request, optimizers: Sequence[Optimizer]) -> None:
        world, model, old = self.world, self._model, self._session
        world.run_on_all(lambda: self._check_can_move(optimizers))
        first = _holders_of(world.all_gather(_held_tensors(model)))
        before = {id(parameter): first[name] for name, parameter in model.named_parameters()}
        steps, calls, stepped = world.progress.step, world.progress.calls, set(self._attachment.stepped)
        with world.opening():
            try:
                with old.timed("gather"):
                    self._settle()
                    self._attachment.end()
                    take_back(model, lambda name, tensor: self._whole(name, tensor, first[name][0]))
                    world.give_back(self._session.loan)
                    self._is_whole = True
                session = self._prepare(request)
                with session.timed("move"):
                    _move_states(optimizers, before, session.placed.holdings.by_id, world)
            except BaseException as error:
                error.add_note("handle.replan() failed and this handle is done; go on from a checkpoint, on every rank")
                self._is_whole = self._is_over = True  # there is nothing that could be brought together
                loops.leave(self)
                raise
        session.setup_ms = {"gather": old.setup_ms["gather"], **session.setup_ms}
        self._begin(session)
        self._attachment.stepped.update(stepped)
        world.progress.step, world.progress.calls = steps, calls

    def _check_can_move(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ModuleContractError where something would be lost if parameters moved to other ranks."""
        self._check_between_steps()
        with_gradient = [name for name, p in self._model.named_parameters() if p.grad is not None]
        if with_gradient:
            raise ModuleContractError(
                f"replan() while {with_gradient[0]} has a gradient, which would not move to other ranks with it; call "
                "it between steps, after optimizer.zero_grad()"
            )
        own = {id(parameter) for parameter in self._model.parameters()}
        for stepped in self._attachment.stepped:
            holds = any(id(parameter) in own for group in stepped.param_groups for parameter in group["params"])
            if holds and not any(stepped is optimizer for optimizer in optimizers):
                raise ModuleContractError(
                    f"an {type(stepped).__name__} that was not given has stepped parameters of this model, which may "
                    "move to other ranks, and its state only with them; call replan(..., optimizer=[...]) with all of "
                    "them"
                )

    def _log(self) -> None:
        if self.world.rank == 0:
            super()._log()

    def metrics(self) -> dict[str, float]:
        """Returns what ``Handle.metrics`` does, and what this rank sent to others since ``clear_timeline()``.

        ``sent_bytes/forward/NAME`` are rows of a module's arguments and results, ``sent_bytes/backward/NAME`` their
        gradients, and ``sent_bytes/reduce/NAME`` the gradients of its parameters that were reduced over its ranks.
        Where plans were tried at the start: ``trials``, ``trial_steps``, ``trial_lost_ms``, and the median step of each
        plan in ``trial_ms/PLAN``, measured on the slowest rank; there the optimizer has no part.
        """
        executor = self._executor
        sent = executor.traffic.metrics() if isinstance(executor, RankExecutor) else {}
        return {**super().metrics(), **self._session.report.metrics, **sent}

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
        executor = self._executor
        spans = [] if executor is None else computed_spans(executor.spans())
        trace_of(spans, self.world).write(path)
        return path

    def _the_ranks(self) -> World:
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
        """Returns the batches of this rank's loader: ``DataLoader(data, batch_sampler=handle.sampler(data, 64))``.

        Every rank calls it, between the same steps.

        Args:
            data: The data set, or how many samples it has, or a sampler of indices that is the same on all ranks.
            global_batch: Rows of all ranks together.
            least: Rows that each rank loads in any case; torch's own ``collate_fn`` needs one.
            shuffle: Whether to draw another order each epoch.
            seed: Of the order; the same on all ranks.
            drop_last: Whether to leave out samples that make no whole batch.
        """
        shares = rows_to_load(global_batch, self.world.size, self._session.placed.feeds, least=least)
        if max(shares) - min(shares) > 1 and isinstance(self._executor, RankExecutor):
            self._executor.route_all()
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

        It also ends the heartbeats, which tells the other ranks that this one is done. Parameters stay the same
        objects. An optimizer has no state yet for those that were not on its rank.

        Args:
            gather: Whether to bring the parameters together, for which every rank must have memory; False where other
                ranks may be gone.
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
        return frozenset(
            key for key, ranks in self._session.placed.holdings.by_id.items() if len(ranks) < self.world.size
        )

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
        return self._session.placed.holdings.by_name.get(name, (0,))[0]

    def _whole(self, name: str, tensor: torch.Tensor, source: int | None = None) -> torch.Tensor:
        """Returns a copy of a tensor, with its values on a rank that holds it; on the first by default."""
        device = self._session.placed.holdings.devices.get(name, self.world.device)
        source = self._source_of(name) if source is None else source
        whole = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()
        with self.world.progress.waiting(THE_LOOP, "agreement"):
            dist.broadcast(whole, src=source, group=self.world.carrier_of(whole))
        return whole


def _held_tensors(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str, bool]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype), not tensor.is_meta) for name, tensor in tensors_of(model)}


def _holders_of(by_rank: Sequence[Mapping[str, tuple[tuple[int, ...], str, bool]]]) -> dict[str, Members]:
    """Returns the ranks that hold each tensor.

    Raises:
        ModuleContractError: The model was not changed alike on all ranks, or a tensor has no values anywhere.
    """
    for rank, theirs in enumerate(by_rank):
        if [(name, *of[:2]) for name, of in theirs.items()] != [(name, *of[:2]) for name, of in by_rank[0].items()]:
            differing = [
                name for name in {**by_rank[0], **theirs} if theirs.get(name, ())[:2] != by_rank[0].get(name, ())[:2]
            ]
            which = f"{differing[0]} is another one, or on one of them only" if differing else "in another order"
            raise ModuleContractError(
                f"the model of rank {rank} is not that of rank 0: {which}; make the same changes on all ranks"
            )
    holders = {name: tuple(rank for rank, of in enumerate(by_rank) if of[name][-1]) for name in by_rank[0]}
    lost = next((name for name, ranks in holders.items() if not ranks), None)
    if lost is not None:
        raise ModuleContractError(f"no rank has the values of {lost}; put a module there that is whole on some rank")
    return holders


def _move_states(
    optimizers: Sequence[Optimizer], before: Mapping[int, Members], after: Mapping[int, Members], world: World
) -> None:
    """Gives ranks the state of parameters that are new to them, and drops that of parameters that they gave up.

    Every rank calls it, with optimizers of the same parameters in the same order. One parameter's state at a time goes
    from the first rank that has it to all of them, through host memory.

    Raises:
        MosaicError: The ranks' optimizers have different numbers of parameters.
    """
    own = [
        (optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    counts = world.all_gather(len(own))
    if len(set(counts)) > 1:
        each = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
        raise MosaicError(f"the ranks' optimizers have different numbers of parameters ({each}); make them alike")
    for optimizer, parameter in own:
        had, holds = before.get(id(parameter), ()), after.get(id(parameter), ())
        if had and not set(holds) <= set(had):
            state = world.broadcast(_on_host(optimizer.state.get(parameter)) if world.rank == had[0] else None, had[0])
            if state is not None and world.rank in holds and world.rank not in had:
                optimizer.state[parameter] = pytree.tree_map_only(_Moved, lambda moved: moved.on(world.device), state)
        if id(parameter) in after and world.rank not in holds:
            optimizer.state.pop(parameter, None)


class _Moved:
    """A tensor on its way, which was in host memory or on its rank's device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.is_on_device = tensor.detach().cpu(), tensor.device.type != "cpu"

    def on(self, device: torch.device) -> torch.Tensor:
        return self.tensor.to(device) if self.is_on_device else self.tensor


def _on_host(state: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, _Moved, state)
