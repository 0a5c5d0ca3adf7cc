"""Processes of one job for tests: how they are started, what they train, and how they answer."""
