"""Everything that a GPU must show."""
