"""A session on one of several ranks, and the plan that it ends with; all ranks take the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from mosaic.engine.calls.signature import Signature
from mosaic.engine.placing import PlacedPlan
from mosaic.engine.session import Session, refuse_graphs_of_compiler
from mosaic.profiler import ProfileCache
from mosaic.ranks.calls.executor import RankExecutor
from mosaic.ranks.calls.routed import Template
from mosaic.ranks.parameters.tied import Holdings
from mosaic.ranks.rows.sampler import Feed
from mosaic.ranks.running.prepare import find_with_rows, learn_call
from mosaic.ranks.world.groups import GroupLoan, check_place
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World, facts_of
from mosaic.take_turns import TrialReport, TrialSettings

RANK_TRIAL = TrialSettings(
    max_steps=60, max_lost_steps=30, steps_per_visit=2, warm_steps=1, rounds_to_win=5, max_plans=2
)
"""The default trial: short turns, and so many that one slow moment of the machine decides nothing."""


class RankPlan(PlacedPlan):
    """A plan that is ready to run on all ranks.

    Attributes:
        holdings: The ranks that hold each tensor of the model.
        feeds: Bytes of modules' rows.
        notes: Lines for ``describe()``.
    """

    holdings: Holdings
    feeds: tuple[Feed, ...]
    notes: tuple[str, ...]
    executor: RankExecutor


@dataclass(slots=True, kw_only=True)
class RankSession(Session):
    """A session on one of several ranks."""

    world: World
    cache: ProfileCache = field(default_factory=ProfileCache)
    """Measurements of this process."""
    batched: Mapping[str, tuple[bool, ...]] = field(init=False)
    """For each module, which of its arguments have a row for each sample."""
    learned: Mapping[str, tuple[Template, Signature]] = field(init=False)
    """For each module its result, and what its call showed."""
    placed: RankPlan = field(init=False)
    report: TrialReport = field(init=False)
    """Of the plans that were tried."""
    loan: GroupLoan = field(init=False)
    """The plan's communicators."""

    def find(self) -> None:
        """Finds the modules and examines their calls, and gives all ranks rank 0's weights.

        Raises:
            MosaicError: A rank cannot run the model, or ranks are not alike; on all ranks.
        """
        world, model, request = self.world, self.model, self.request
        backend = request.backend
        world.run_on_all(lambda: check_place(model, backend.torch_device))
        self.finding, self.batched = world.run_on_all(
            lambda: find_with_rows(model, request.sample, request.modules, request.exclude)
        )
        world.run_on_all(lambda: refuse_graphs_of_compiler(self.finding, backend))
        self.learned = world.run_on_all(lambda: {s.name: learn_call(model, s) for s in self.finding.subjects})
        world.check_alike(facts_of(backend.device, self.finding.graph))
        for tensor in (*model.parameters(), *model.buffers()):
            with world.progress.waiting(THE_LOOP, "agreement"):
                dist.broadcast(tensor.detach(), src=0, group=world.carrier_of(tensor))

    @property
    def trial_settings(self) -> TrialSettings | None:
        """The bounds of the trial; None where the plan runs untried."""
        trial, options = self.request.options.trial, self.request.options
        if trial != "auto":
            return trial
        return RANK_TRIAL if self.request.plan is None and options.method == "auto" else None
