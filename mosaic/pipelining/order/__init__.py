"""Orders of rows' tasks: simulation, roll-out from a ranking of groups, and search."""
