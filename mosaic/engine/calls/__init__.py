"""One call of a module: its arguments, what is known of it, and what it does to tensors."""
