"""Rows of a batch: which arguments have them, which rank has which, and which way they take.

``routing`` and ``layout`` are arithmetic without torch. Imports no other package of ``mosaic.ranks``.
"""
