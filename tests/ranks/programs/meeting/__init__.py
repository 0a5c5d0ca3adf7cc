"""How ranks meet, and what goes wrong between them."""
