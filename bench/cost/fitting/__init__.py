"""Coefficients of interference from groups of modules that ran side by side, and the choice of such groups."""
