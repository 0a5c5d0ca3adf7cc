"""Coefficients of interference from modules that ran side by side, and which modules to run for them."""
