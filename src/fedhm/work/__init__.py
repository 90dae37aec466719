"""What clients do."""
