"""The ranks of a run: their rendezvous, communicators, places and failures."""
