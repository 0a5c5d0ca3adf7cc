"""Planning problems as files, the checker of their plans, and their costs."""
