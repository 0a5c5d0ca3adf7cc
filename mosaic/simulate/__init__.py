"""A simulator of when things run: stages, slices and schedules of microbatches, without barriers."""
