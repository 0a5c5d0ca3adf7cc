"""Parameters that lie on some ranks: trained, saved, and asked for as a whole."""
