"""Ways in which two pieces of work share a device, and the steps that are taken on them."""
