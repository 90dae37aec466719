"""What networks cost."""
