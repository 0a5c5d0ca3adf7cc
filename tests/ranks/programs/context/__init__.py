"""Programs of ranks that share a sequence."""
