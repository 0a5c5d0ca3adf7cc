"""A plan that runs: its modules made ready on all ranks, the handle, and what an unchanged loop calls of torch.

Imports all packages but ``choosing``.
"""
