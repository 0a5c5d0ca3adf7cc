"""``mosaic doctor``: diagnoses a machine, a model, or the ranks of a run."""
