"""The study of a GPU."""
