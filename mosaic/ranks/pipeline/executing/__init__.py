"""Executing a schedule on one rank: its actions one by one, each by the work or the transport."""
