"""The cost of Mosaic itself."""
