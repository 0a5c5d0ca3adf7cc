"""The exact search and what it is compared with: C++ asked for the best stages, and brute force."""
