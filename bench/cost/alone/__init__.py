"""What a module takes alone: surfaces, how many points they take, and counted operators on a description."""
