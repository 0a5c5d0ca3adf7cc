"""How a cost model for one rank becomes one for many: what ranks send each other, as time."""

from mosaic.cost.communication.collectives import CollectiveSms
from mosaic.cost.communication.ranked import RankedCost
from mosaic.cost.communication.traffic import ModuleTraffic, exposed_ms, reduce_ms, route_ms

__all__ = ["CollectiveSms", "ModuleTraffic", "RankedCost", "exposed_ms", "reduce_ms", "route_ms"]
