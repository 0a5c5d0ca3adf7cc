"""Ranks that hold a parameter, parameters that modules share, and sums of gradients over the holders."""
