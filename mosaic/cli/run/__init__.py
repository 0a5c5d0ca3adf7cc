"""``mosaic run``: trains a model plain and colocated in turn."""
