"""Leaving a model and its process as they were found, whatever is run in between."""
