"""Executing a schedule on one rank: each lane's actions one by one, each by the work or the transport."""
