"""Studies of speed and accuracy: one question a file, one harness, results under ``bench/results``."""
