"""Finding the modules of a model, which feeds which, and what its user should know."""
