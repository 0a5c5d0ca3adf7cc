"""The files that ``mosaic retrain init`` writes into a new folder, as they are."""
