"""One file a paper: each of its figures and tables, the values as its text prints them, and which of ours answer."""
