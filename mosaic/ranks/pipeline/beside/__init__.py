"""Beside the steps of a pipeline: evaluation, timelines of steps that have run, the whole model on every rank."""
