"""A cost model for several ranks, made from one of compute: routing and the reduction of gradients beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mosaic.cost.communication.collectives import CollectiveInterference, CollectiveSms
from mosaic.cost.communication.traffic import GradientSum, ModuleTraffic, exposed_ms, gradient_sum, route_ms
from mosaic.cost.protocol import Cost
from mosaic.cost.retimed import RetimedCost
from mosaic.hardware import Cluster, Link
from mosaic.profile import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Times of one module at one degree, in milliseconds; predicted."""

    route_forward_ms: float = 0.0
    """Arguments to its devices and results home."""
    route_backward_ms: float = 0.0
    """Gradients the other way."""
    reduce_ms: float = 0.0
    """Of summing its parameters' gradients what is left when its backward has ended."""
    hidden_ms: float = 0.0
    """Of summing them what the backward hides."""

    def of(self, phase: Phase) -> float:
        """Returns what is added to a phase."""
        return self.route_forward_ms if phase is Phase.FORWARD else self.route_backward_ms + self.reduce_ms

    def busy_ms(self, phase: Phase) -> float:
        """Returns how long messages of a phase travel, hidden or not."""
        return self.of(phase) + (self.hidden_ms if phase is Phase.BACKWARD else 0.0)


class RankedCost(RetimedCost):
    """A cost model for several ranks: another one's times with the communication of the engine beside them.

    Each module has the network to itself: modules that sum gradients at the same time do not slow each other down.
    ``mosaic.simulate`` can take that into account.

    Args:
        base: Times of compute, and of whatever else its backward has: ``included_ms``.
        traffic: What each module takes and makes.
        network: Between the ranks; a link alone is a plain ring, as gloo's or as one that was measured.
        num_ranks: Ranks that hold the batch.
        included_ms: What the base's backward already has for summing gradients, of a module at a degree.
        with_reduction: Whether summing gradients takes time; where not, the base's is taken out.
        sms: What collectives take from modules; nothing by default.
        routes: The link for rows that travel, where it is another one, as on the host: sums go both ways at a time.
        agreement_ms: What ranks take to agree on a call of a module that is not on all of them, in milliseconds.

    Raises:
        ValueError: There are no ranks.
    """

    def __init__(
        self,
        base: Cost,
        traffic: Mapping[str, ModuleTraffic],
        network: Cluster | Link,
        num_ranks: int,
        *,
        included_ms: Callable[[str, int], float] = lambda module, degree: 0.0,
        with_reduction: bool = True,
        sms: CollectiveSms | None = None,
        routes: Link | None = None,
        agreement_ms: float = 0.0,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks={num_ranks}; there is at least one rank")
        super().__init__(base)
        self.num_ranks = num_ranks
        self._traffic = dict(traffic)
        self._network = network
        self._route_network = routes or network
        self._agreement_ms = agreement_ms
        self._included_ms = included_ms
        self._with_reduction = with_reduction
        self._lost = sms.lost if sms is not None else 0.0
        self._known: dict[tuple[str, int, int], Communication] = {}
        self._routes: dict[tuple[str, int], tuple[float, float]] = {}
        self._longest: dict[tuple[str, Phase], float] = {}
        if self._lost > 0 and num_ranks > 1:
            self.interference = CollectiveInterference(base.interference, self._lost, self.longest_ms)

    def communication(self, module: str, degree: int, quota: int) -> Communication:
        """Returns what a module's communication takes at a degree, and what its backward at a quota hides of it."""
        key = (module, degree, quota)
        if key not in self._known:
            self._known[key] = self._communication(module, degree, quota)
        return self._known[key]

    def longest_ms(self, module: str, phase: Phase) -> float:
        """Returns how long a module's messages of a phase travel at most, over its degrees and quotas."""
        if (module, phase) not in self._longest:
            self._longest[module, phase] = max(
                self.communication(module, degree, quota).busy_ms(phase)
                for degree in self.degrees(module)
                if degree <= self.num_ranks
                for quota in self.quotas(module, degree)
            )
        return self._longest[module, phase]

    def compute_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time without communication, in milliseconds."""
        base_ms = self.base.time_ms(module, phase, degree, quota)
        if phase is Phase.FORWARD or degree == 1:
            return base_ms
        return max(0.0, base_ms - self._included_ms(module, degree))

    def time_ms(self, module: str, phase: Phase, degree: int, quota: int) -> float:
        """Returns the time alone on its devices, communication included, in milliseconds."""
        found = self.communication(module, degree, quota)
        taken = found.hidden_ms * self._lost if phase is Phase.BACKWARD else 0.0
        return self.compute_ms(module, phase, degree, quota) + found.of(phase) + taken

    def summed(self, module: str, degree: int) -> GradientSum:
        """Returns what summing a module's gradients takes, hidden or not."""
        num_bytes = self._traffic.get(module, ModuleTraffic()).parameter_gradients
        if not self._with_reduction or degree <= 1 or num_bytes <= 0:
            return GradientSum()
        return gradient_sum(num_bytes, degree, self._network)

    def _communication(self, module: str, degree: int, quota: int) -> Communication:
        own = self._traffic.get(module, ModuleTraffic())
        exposed = hidden = 0.0
        forward_ms, backward_ms = self._routed_ms(module, own, degree)
        whole = self.summed(module, degree)
        if whole.time_ms > 0:
            compute_ms = self.compute_ms(module, Phase.BACKWARD, degree, quota)
            exposed = exposed_ms(whole.time_ms, compute_ms, whole.buckets)
            hidden = whole.time_ms - exposed
        if degree < self.num_ranks:
            forward_ms += self._agreement_ms
        return Communication(
            route_forward_ms=forward_ms, route_backward_ms=backward_ms, reduce_ms=exposed, hidden_ms=hidden
        )

    def _routed_ms(self, module: str, own: ModuleTraffic, degree: int) -> tuple[float, float]:
        """Of forward and backward."""
        if (module, degree) not in self._routes:
            there, back, given, taken = (
                route_ms(num_bytes, self.num_ranks, degree, self._route_network)
                for num_bytes in (own.arguments, own.results, own.result_gradients, own.argument_gradients)
            )
            self._routes[module, degree] = there + back, given + taken
        return self._routes[module, degree]
