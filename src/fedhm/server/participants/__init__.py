"""Who takes part in a round, at which tier, and how long it takes them."""
