"""What the page shows, a file for each."""
