"""Running placed calls on the host: each lane is a thread, and branches have autograd graphs of their own."""
