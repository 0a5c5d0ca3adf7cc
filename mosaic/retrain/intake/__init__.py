"""Data that arrives: which of it is new, and whether it is trained on."""
