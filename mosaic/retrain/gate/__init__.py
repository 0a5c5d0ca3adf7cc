"""Whether today's model may take the champion's place: paired comparisons on the same rows, resampled by cluster."""
