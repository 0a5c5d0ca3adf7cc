"""The study of the cost model: how well it predicts, and what its plans cost."""
