"""One call of a module that runs on some of the ranks: what is agreed, moved and computed, in which order, and back.

``steps`` is the order, as data; ``ranked`` is the module; ``passing`` runs one call of it on whatever thread it is
given. Imports ``watching``, ``meeting``, ``rows`` and ``parameters``.
"""
