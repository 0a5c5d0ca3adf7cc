"""The papers' figures, baselines, models, data sets and workloads."""
