"""How long a module takes at any degree and quota: surfaces through measured times, and where to measure next."""
