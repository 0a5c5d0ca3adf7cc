"""Before the loop: rank 0 profiles and solves, and all ranks try the plans that are worth it.

``routed`` predicts what travels. Imports all other packages.
"""
