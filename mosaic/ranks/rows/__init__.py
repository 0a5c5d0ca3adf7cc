"""Rows of a batch: which arguments have them, their way between ranks, and loading them where they are used."""
