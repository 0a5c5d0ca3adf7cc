"""Ways of sharing a device between two pieces of work, and their steps."""
