"""An instance's option tables as the cost model that every solver and planner asks, and why an instance has no plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy

from mosaic.artifact import fingerprint
from mosaic.cost.interference import Interference, Neighbours
from mosaic.cost.protocol import TimedBeside
from mosaic.errors import InfeasibleError
from mosaic.profile import Phase
from mosaic.solver.instances.instance import Instance, InstanceModule, InstanceOption


class TableInterference:
    """What an instance's disturbances add up to."""

    is_pairwise = True

    def __init__(self, instance: Instance, num_slots: int | None = None) -> None:
        """Takes the pairs of an instance; on devices of other slots than its own where a number is given."""
        self._num_slots = num_slots or instance.num_slots
        self._shares: Mapping[tuple[str, str, Phase], float] = {
            (one.module, one.beside, phase): share
            for one in instance.disturbances
            for phase, share in ((Phase.FORWARD, one.forward), (Phase.BACKWARD, one.backward))
            if share > 0
        }

    @property
    def is_zero(self) -> bool:
        """Whether no module disturbs another."""
        return not self._shares

    def extra_ms(self, module: str, phase: Phase, *, quota: int, alone_ms: float, beside: Neighbours) -> float:
        """Returns the sum over the neighbours, each in proportion to its quota, in milliseconds."""
        shares = (self._shares.get((module, name, phase), 0.0) * held for name, held in beside)
        return alone_ms * sum(shares) / self._num_slots

    def pair_shares(
        self, module: str, beside: str, phase: Phase, *, quotas: Sequence[int], beside_quotas: Sequence[int]
    ) -> Sequence[Sequence[float]]:
        """Returns what one neighbour costs, as shares of the time alone; see ``PairShares``."""
        share = self._shares.get((module, beside, phase))
        if share is None:
            return ()
        return [[share * held / self._num_slots for held in beside_quotas]] * len(quotas)


class TableCost(TimedBeside):
    """Times and memory as the tables of an instance have them; options that a pin forbids are not there."""

    def __init__(self, instance: Instance) -> None:
        """Takes the allowed options of every module.

        Raises:
            InfeasibleError: A pin leaves a module nothing; every such module is named.
        """
        reasons = [_pinned_to_nothing(module) for module in instance.modules if not module.allowed]
        if reasons:
            raise InfeasibleError("pins leave nothing to choose from", reasons=reasons)
        self.profile_fingerprint: str | None = fingerprint(instance)
        self._instance = instance
        self.interference: Interference = TableInterference(instance)
        self._facts = {module.name: (module.options, module.pin) for module in instance.modules}
        self._tables: dict[str, dict[int, dict[int, InstanceOption]]] = {}
        for module in instance.modules:
            table = self._tables.setdefault(module.name, {})
            for option in module.allowed:
                table.setdefault(option.degree, {})[option.quota] = option

    def facts(self, module: str) -> Hashable:
        """Returns a module's options and pin: where another instance has the same, it answers the same."""
        return self._facts[module]

    def with_slots(self, num_slots: int) -> TableCost:
        """Returns the same tables on devices of so many slots: neighbours then hold other shares of a device."""
        other = copy(self)
        other.interference = TableInterference(self._instance, num_slots)
        return other

    def degrees(self, module: str) -> tuple[int, ...]:
        """Returns the degrees of its table, rising."""
        return tuple(sorted(self._tables[module]))

    def quotas(self, module: str, degree: int = 1) -> tuple[int, ...]:
        """Returns the quotas of its table at a degree, rising."""
        return tuple(sorted(self._tables[module][degree]))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone, in milliseconds."""
        option = self._tables[module][degree][quota]
        return option.forward_ms if phase is Phase.FORWARD else option.backward_ms

    def memory_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each of its devices."""
        return next(iter(self._tables[module][degree].values())).memory_bytes

    def kept_bytes(self, module: str, degree: int) -> int:
        """Returns the bytes on each of its devices that stay while other stages run."""
        option = next(iter(self._tables[module][degree].values()))
        return option.resident_bytes + option.activation_bytes


def _pinned_to_nothing(module: InstanceModule) -> str:
    pin = module.pin
    degrees = sorted({option.degree for option in module.options})
    quotas = sorted({option.quota for option in module.options})
    return (
        f"{module.name!r} is pinned to degrees {list(pin.degrees) or 'any'} and quotas {list(pin.quotas) or 'any'}, "
        f"which none of its options has together; it has degrees {degrees} and quotas {quotas}: loosen one of both pins"
    )
