"""Who the ranks are, where each one is, and what becomes of the run when one fails.

``roll`` calls them together, ``progress`` and ``traffic`` note what a rank does and sends, ``watch`` looks after the
others, ``verdict`` says which one is at fault, ``alarm`` and ``freeing`` get the rest out of what they wait for. It
stands at the bottom: it imports no other package of ``mosaic.ranks``.
"""
