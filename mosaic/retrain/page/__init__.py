"""The morning's report: one static page of a day, without script and without network."""

from mosaic.retrain.page.document import page_of, write_page

__all__ = ["page_of", "write_page"]
