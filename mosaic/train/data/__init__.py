"""The data of a day by position: which sample comes n-th, drawn under which random numbers, read by whom."""
