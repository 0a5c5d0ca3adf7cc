"""A model's layers on ranks in a pipeline; ``mosaic/pipeline.py`` is the front door, ``step.py`` the main path.

``handle`` is what the user holds, ``setup`` and ``trial`` make and choose its plan, ``schedules`` has each step's.
``executor`` compiles a schedule and runs it, on ``lanes``; ``chunk_work`` computes and ``transport`` carries.
``rank_grid``, ``gradient_sums``, ``tensor`` and ``sequences`` lay ranks out and have several share weights, layers and
sequences.
"""
