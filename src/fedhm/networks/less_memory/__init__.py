"""Training with less memory: batches in parts, and blocks that run again in the backward pass."""
