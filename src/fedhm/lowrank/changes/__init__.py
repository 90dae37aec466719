"""What clients of different ranks changed: how long it is, its bands, and the mean in the span of factors."""
