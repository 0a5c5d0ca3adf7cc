"""What ranks do in tests, a function a rank; the rooms are those of ``mosaic.ranks``."""
