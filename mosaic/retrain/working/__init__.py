"""The process that needs torch: looks at a day, trains it, scores versions; checks and verifies by day."""
