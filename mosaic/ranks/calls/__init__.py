"""Calls of modules that run on some of the ranks.

``routed`` is a module, ``exchange`` its messages, ``call`` one call of it. ``executor`` runs the calls of a model, on
threads of the host (``host``) or on a GPU's streams (``streams``).
"""
