"""Figures of the papers: what each prints, which of our figures answers it, and those that no other study makes."""
