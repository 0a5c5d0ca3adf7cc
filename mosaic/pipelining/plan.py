"""Corrections of counted times by measured steps, and the plan that a trial ends with, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mosaic.pipelining.layers import AS_COUNTED, IN_PROPORTION, CountedModule, LayeredModule, ModuleFit, PipelineModel
from mosaic.pipelining.partition import Partition
from mosaic.pipelining.rank_hardware import Degrees
from mosaic.pipelining.task_graph import HostTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTimes:
    """All corrections; plain data."""

    modules: dict[str, ModuleFit]
    """By module."""
    host: HostTimes
    share_exponents: dict[str, float] = field(default_factory=dict)
    """By module measured on lanes; see ``CountedModule``."""

    @classmethod
    def of(cls, modules: Iterable[LayeredModule], host: HostTimes) -> FittedTimes:
        """Collects the corrections of modules."""
        counted = [module for module in modules if isinstance(module, CountedModule)]
        return cls(
            modules={module.name: module.fit for module in counted},
            host=host,
            share_exponents={
                module.name: module.share_exponent for module in counted if module.share_exponent != IN_PROPORTION
            },
        )

    def model(self, model: PipelineModel) -> PipelineModel:
        """Returns a counted model with these corrections."""
        modules = []
        for module in model.modules:
            assert isinstance(module, CountedModule)
            fit = self.modules.get(module.name, AS_COUNTED)
            exponent = self.share_exponents.get(module.name, IN_PROPORTION)
            modules.append(replace(module, fit=fit, share_exponent=exponent))
        return replace(model, modules=tuple(modules))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Value of ``Pipeline.plan``, for ``mosaic.pipeline(plan=)`` with the same model and sample."""

    name: str
    """Readable name."""
    baseline: str
    """One of ``BASELINES``; empty: each step is planned."""
    degrees: Degrees
    """The grid."""
    partition: Partition
    """Layers of each rank of a pipeline."""
    fitted: FittedTimes
    """Measured corrections of the trial."""
