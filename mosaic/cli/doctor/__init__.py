"""``mosaic doctor``: a machine, a model, or the ranks of a run looked at."""
