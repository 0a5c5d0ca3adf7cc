"""In which order rows run their tasks: simulated, rolled out from a ranking of groups, and searched."""
