"""What modules on one device cost each other: measured pairs, and forms that are fitted to groups."""
