"""Running placed calls on streams of a device: one launching thread, one autograd graph, real tensors."""
