"""A model's layers on ranks in a pipeline.

``begin`` is ``mosaic.pipeline``; ``handle`` what it returns, and ``beside/`` what it has beside steps; ``trial`` tries
``ways`` to run, and ``fitting`` fits counted times to what steps took; ``counting`` says what layers cost;
``chunk_work`` computes a rank's tasks, on ``step_data``, and ``rank_lanes`` opens its lanes. ``executing/`` walks a
schedule's actions, and ``transports/``
carries messages; ``grid/`` lays ranks out as replicas, and ``tensor/`` has several share layers.
"""
