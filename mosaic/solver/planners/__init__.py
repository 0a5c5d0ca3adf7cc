"""Planners to compare with, one file each, over waves of whole devices."""
