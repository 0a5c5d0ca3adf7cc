"""Models and loops, trained plain and colocated, and compared bit for bit."""
