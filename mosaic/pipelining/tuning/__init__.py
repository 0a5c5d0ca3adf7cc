"""Layer tuning: what becomes of each layer's activations, so that memory holds and a step loses least (section 6.3)."""
