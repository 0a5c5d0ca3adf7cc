"""Finding where a model can be cut, by one run that follows its tensors."""
