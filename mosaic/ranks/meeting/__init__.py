"""Who the ranks are, how they speak with each other, where each one is, and what becomes of the run when one fails.

``world`` is all of them, and is what the other packages are given. ``watch`` looks after the others. It stands at the
bottom: it imports no other package of ``mosaic.ranks``.
"""
