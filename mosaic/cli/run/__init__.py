"""``mosaic run``: a model trained plain and colocated in turn."""
