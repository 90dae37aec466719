"""What exported files are worth: cards, with latency and memory measured here."""
