"""The processes of a run: their rendezvous, groups and collectives, and the end of all once one has failed.

It stands at the bottom: it imports no other package of ``mosaic.ranks``.
"""
