"""The six models on a GPU, plain and colocated."""
