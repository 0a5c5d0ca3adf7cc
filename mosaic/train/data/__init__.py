"""The data of a day by position: the n-th sample, its random numbers, and its reader."""
