"""The morning's report: one static page of a day."""
