"""The handle, and what an unchanged loop calls of torch."""
