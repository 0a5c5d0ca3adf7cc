"""A measured trial in the first steps of a loop: which plan is fastest, or whether the plain loop is."""
