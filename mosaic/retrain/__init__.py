"""A folder of days: a model retrained on each day's data, judged, and promoted or kept. See ``mosaic retrain``."""
