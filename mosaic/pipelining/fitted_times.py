"""What measured steps say about counted times: of modules, and of the host that runs their tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mosaic.pipelining.workload.counted import IN_PROPORTION, CountedModule
from mosaic.pipelining.workload.layers import LayeredModule, PipelineModel
from mosaic.pipelining.workload.phase_fit import AS_COUNTED, ModuleFit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Of one task or message, beside layers and the network.

    Raises:
        ValueError: One is negative.
    """

    task_ns: int = 0
    """What a forward takes beside its layers: the model's own Python around them."""
    post_ns: int = 0
    """What a task takes for each message that it sends or receives."""
    message_ns: int = 0
    """What a message takes on its way beside the network's description."""

    def __post_init__(self) -> None:
        if min(self.task_ns, self.post_ns, self.message_ns) < 0:
            raise ValueError(f"{self}; use 0 or more nanoseconds")


NO_HOST_TIMES = HostTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTimes:
    """All of it; plain data."""

    modules: dict[str, ModuleFit]
    """Of each module, where backward is one task."""
    apart: dict[str, ModuleFit]
    """Of each module, where backward for weights is a task of its own; empty: nobody ran it so."""
    host: HostTimes
    """Of tasks and messages."""
    share_exponents: dict[str, float] = field(default_factory=dict)
    """Of modules that were measured on lanes; see ``CountedModule``."""

    @classmethod
    def of(cls, modules: Iterable[LayeredModule], host: HostTimes) -> FittedTimes:
        """Reads them off modules that have them."""
        counted = [one for one in modules if isinstance(one, CountedModule)]
        return cls(
            modules={one.name: one.fit for one in counted},
            apart={one.name: one.fit_apart for one in counted if one.fit_apart is not None},
            host=host,
            share_exponents={one.name: one.share_exponent for one in counted if one.share_exponent != IN_PROPORTION},
        )

    def model(self, model: PipelineModel) -> PipelineModel:
        """Returns a counted model with these times."""
        modules = []
        for one in model.modules:
            assert isinstance(one, CountedModule)
            fit, apart = self.modules.get(one.name, AS_COUNTED), self.apart.get(one.name)
            exponent = self.share_exponents.get(one.name, IN_PROPORTION)
            modules.append(replace(one, fit=fit, fit_apart=apart, share_exponent=exponent))
        return replace(model, modules=tuple(modules))
