"""Schedules of others, to compare with: a partition and orders each."""
