"""Tasks that come and go in a running loop."""
