"""What modules read and write besides arguments and results."""
