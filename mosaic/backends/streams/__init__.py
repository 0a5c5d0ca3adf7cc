"""Lanes on streams of a CUDA runtime: what runs on them, in which order and when; the streams come from elsewhere."""
