"""What ``colocate`` returns on several ranks: a handle, and what needs all ranks together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from mosaic.engine.find import Finding
from mosaic.engine.handle import Handle
from mosaic.engine.placing import PlacedPlan
from mosaic.plan import Plan
from mosaic.profile import Profile
from mosaic.ranks.run import RankedRuns
from mosaic.ranks.world import World


class RankHandle(Handle):
    """A model that is colocated over several ranks.

    Its plan's device i is rank i. ``disabled()`` is of no use here: a rank has only a part of the parameters.

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
    ) -> None:
        super().__init__(model, finding, plan, profile=profile, notes=notes, placed=placed)
        self.world = world
        self._members = {placed.module: tuple(sorted(placed.devices)) for placed in plan.placements}

    def metrics(self) -> dict[str, float]:
        """Returns what ``Handle.metrics`` does, and what this rank sent to others since ``clear_timeline()``.

        ``sent_bytes/forward/NAME`` are rows of a module's arguments and results, ``sent_bytes/backward/NAME`` their
        gradients, and ``sent_bytes/reduce/NAME`` the gradients of its parameters that were reduced over its ranks.
        """
        executor = self._executor
        return {**super().metrics(), **(executor.traffic.metrics() if isinstance(executor, RankedRuns) else {})}

    def _make_ranks(self) -> World:
        return self.world

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm over all ranks is at most ``max_norm``; every rank calls it.

        ``torch.nn.utils.clip_grad_norm_`` sees this rank's parameters only and would scale each rank's differently.

        Returns:
            The norm before, a scalar; the same on every rank.
        """
        own = [p.grad for p in self._counted_here() if p.grad is not None]
        square = torch.stack([g.detach().double().square().sum() for g in own]).sum() if own else torch.zeros(())
        square = square.double()
        dist.all_reduce(square, group=self.world.everyone)
        norm = square.sqrt()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self._model.parameters():
            if parameter.grad is not None and not parameter.is_meta:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        return norm.float()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the plain model's ``state_dict``, whole, on every rank; every rank calls it.

        It is a copy; the plain model loads it.
        """
        found = {}
        for name, tensor in self._model.state_dict().items():
            source = self._source_of(name)
            whole = tensor.detach().clone() if not tensor.is_meta else torch.empty_like(tensor, device="cpu")
            dist.broadcast(whole, src=source, group=self.world.everyone)
            found[name] = whole
        return found

    def _source_of(self, name: str) -> int:
        """Returns the first rank that holds a tensor of the model."""
        return next((members[0] for module, members in self._members.items() if name.startswith(f"{module}.")), 0)

    def _counted_here(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that this rank counts: each is counted by one rank."""
        for name, parameter in self._model.named_parameters():
            if self._source_of(name) == self.world.rank:
                yield parameter
