"""Studies of speed and accuracy, with results under ``bench/results``."""
