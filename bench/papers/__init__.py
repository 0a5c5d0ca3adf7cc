"""Planners, workloads and figures of papers that the product does not need."""
