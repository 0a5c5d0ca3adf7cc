"""How often the gate of ``mosaic retrain`` is wrong."""
