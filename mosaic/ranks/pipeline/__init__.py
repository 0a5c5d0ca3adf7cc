"""Ranks that execute a pipeline's schedule: their actions, what these do, and how messages go from rank to rank.

``executor`` walks one rank's actions; ``program`` is a schedule made ready for that; ``work`` is what computes;
``transport`` is how ranks reach each other, over torch.distributed or as threads of one process.
"""
