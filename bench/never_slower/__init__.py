"""Whether a loop is ever slower with the default line, and what finding that out costs."""
