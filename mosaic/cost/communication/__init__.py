"""How a cost model for one rank becomes one for many: what ranks send each other, as time."""
