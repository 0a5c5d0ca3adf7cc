"""How a cost model for one rank becomes one for many: what ranks send each other, as time."""

from mosaic.cost.communication.collectives import CollectiveSms
from mosaic.cost.communication.ranked import RankedCost
from mosaic.cost.communication.traffic import GradientSum, ModuleTraffic, exposed_ms, gradient_sum, route_ms

__all__ = ["CollectiveSms", "GradientSum", "ModuleTraffic", "RankedCost", "exposed_ms", "gradient_sum", "route_ms"]
