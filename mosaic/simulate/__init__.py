"""What runs when, simulated: stages, slices and schedules of microbatches, without barriers."""
