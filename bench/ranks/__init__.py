"""The same loop on many ranks."""
