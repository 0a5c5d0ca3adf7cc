"""Green-context streams on a GPU; the only package that loads the extension ``mosaic._C``."""
