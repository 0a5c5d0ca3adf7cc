"""Small days of data for ``mosaic retrain``: what ``init`` writes, and seven days in which something happens."""
