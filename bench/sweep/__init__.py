"""The sweep: models and loops that people write, trained in the plain way and colocated, compared bit for bit."""
