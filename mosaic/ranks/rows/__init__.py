"""Rows of a batch: which arguments have them, which rank has which, and where they go.

``routing`` is arithmetic without torch. Imports no other package of ``mosaic.ranks``.
"""
