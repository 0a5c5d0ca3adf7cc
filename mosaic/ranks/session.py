"""A session on one of several ranks: finding, planning, the trial and the lanes; all ranks take the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from mosaic.engine.calls.signature import Signature
from mosaic.engine.session import Session, refuse_graphs_of_compiler
from mosaic.plan import Plan
from mosaic.profiler import ProfileCache
from mosaic.ranks.calls.routed import Template
from mosaic.ranks.choosing.plans import RANK_TRIAL, Candidates, plans_of_first, rank_plans_to_try
from mosaic.ranks.choosing.rank_trial import try_plans
from mosaic.ranks.running.place import RankPlan, open_executor, place
from mosaic.ranks.running.prepare import find_with_rows, learn_call
from mosaic.ranks.world.groups import GroupLoan, check_place
from mosaic.ranks.world.progress import THE_LOOP
from mosaic.ranks.world.world import World, facts_of
from mosaic.take_turns import TrialReport, TrialSettings


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

    def choose(self) -> Candidates:
        """Returns the plans to try: rank 0 profiles and solves, unless the request has a plan."""
        world, trial, plan, graph = self.world, self.trial_settings, self.request.plan, self.finding.graph
        if plan is None:
            candidates = plans_of_first(self, trial)
            self.is_rough = candidates.is_rough
            return candidates
        world.run_on_all(lambda: plan.check_matches(graph=graph, device=self.request.backend.device))
        world.check_same_plan(plan.fingerprint, plan.num_devices)
        if trial is None:
            return Candidates(plans=(plan,), sentences=("no plan is tried: the one that was given runs",))
        return rank_plans_to_try(plan, graph, trial, communication_slots=plan.communication_slots)

    @property
    def trial_settings(self) -> TrialSettings | None:
        """The bounds of the trial; None where the plan runs untried."""
        trial, options = self.request.options.trial, self.request.options
        if trial != "auto":
            return trial
        return RANK_TRIAL if self.request.plan is None and options.method == "auto" else None

    def decide(self, candidates: Candidates) -> Plan:
        """Tries the plans where there are several; returns the one to run."""
        trial, plan = self.trial_settings, candidates.plans[0]
        self.report = TrialReport(sentences=candidates.sentences)
        if trial is not None and len(candidates.plans) > 1:
            with self.timed("try"):
                plan, report = try_plans(self, candidates.plans, trial)
            self.report = replace(report, sentences=(*report.sentences, *candidates.sentences))
        return plan

    def start(self, plan: Plan) -> None:
        """Opens the lanes of a plan and gives its modules to their ranks."""
        world = self.world
        world.max_ctas = plan.communication_sms or None
        executor = open_executor(self, plan, is_warm=self.report.has_steps)
        with world.groups.lending() as self.loan:
            self.placed = place(self, plan, executor)
        world.groups.destroy_spare()
        self.plans = (plan,)
        self.notes = (*self.report.sentences, *self.placed.notes, *self.request.backend.notes)
        self.finding.forget_run()
