"""Planning of the next step while this one runs, in a process or a thread of its own (PipeWeaver, section 7)."""
