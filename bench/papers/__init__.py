"""Figures of papers: their numbers, baselines, models, data sets and workloads."""
