"""The worker process, which needs torch: checks data, trains, scores versions; rehearses and verifies by day."""
