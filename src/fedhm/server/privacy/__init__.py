"""Differential privacy of clients: bounded changes, noise, independent sampling, and what it comes to."""
