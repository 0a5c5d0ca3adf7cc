"""The study of daily retraining."""
