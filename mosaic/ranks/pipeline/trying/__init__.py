"""The start of a pipeline: which ways there are to run its steps, how long layers take, and which way is fastest."""
