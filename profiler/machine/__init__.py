"""The machine around a measurement: its counters, its other load, its links between ranks."""
