"""Time and memory of modules, alone and side by side."""
