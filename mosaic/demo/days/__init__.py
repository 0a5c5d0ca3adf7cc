"""Small days of data for ``mosaic retrain``: the files of ``init``, and the seven days of the demo."""
