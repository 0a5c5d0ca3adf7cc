"""Routed calls: their order, what they read, and which are refused."""
