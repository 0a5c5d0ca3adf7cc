"""Loops as people write them."""
