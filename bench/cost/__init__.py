"""The study of the cost model's predictions."""
