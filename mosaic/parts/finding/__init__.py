"""The split of a model, from one run that follows its tensors."""
