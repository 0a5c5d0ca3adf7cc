"""Plans for all ranks: made, tried, and made anew."""
