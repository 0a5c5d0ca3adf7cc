"""Green-context streams on a GPU, and the only files that load the extension ``mosaic._C``."""
