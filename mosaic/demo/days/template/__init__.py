"""The files that ``mosaic retrain init`` copies into a new folder."""
