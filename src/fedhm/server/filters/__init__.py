"""What happens to participants, tasks, updates and the merged state of a round, one concern a file."""
