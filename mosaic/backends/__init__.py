"""Where modules run: one protocol, one module a backend."""
