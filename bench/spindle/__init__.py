"""Figures 8 to 16 of the Spindle paper, predicted: its workloads under every planner."""
