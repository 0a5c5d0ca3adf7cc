"""SEMU, the step emulator (PipeWeaver, section 4): operators and tensors on devices, as times and memory timelines."""
