"""What ranks run that share a sequence."""
