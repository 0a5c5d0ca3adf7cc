"""Algorithm 1 of the paper: greedy clustering into stages, each evaluated by CP-SAT."""
