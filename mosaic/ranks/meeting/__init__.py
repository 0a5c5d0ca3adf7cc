"""How ranks speak with each other: what is theirs, whether they are alike, and the communicators between them.

``world`` is all of them, and is what the other packages are given. Imports ``watching``.
"""
