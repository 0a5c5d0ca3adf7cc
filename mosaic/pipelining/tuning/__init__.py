"""Layer tuning: activation strategies within memory at the least cost (PipeWeaver, section 6.3)."""
