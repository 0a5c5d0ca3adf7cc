"""The cost of training that is left alone: its saves, its loader, its start."""
