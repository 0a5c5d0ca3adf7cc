"""Long sequences over ranks: how fast they are planned, how even they are, what has to travel."""
