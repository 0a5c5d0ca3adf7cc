"""Parameters and their gradients: which ranks hold them, what modules share, and sums over their holders.

Imports ``meeting``.
"""
