"""Programs of ranks in tests, by the packages of ``mosaic.ranks``."""
