"""The study of planners on many ranks."""
