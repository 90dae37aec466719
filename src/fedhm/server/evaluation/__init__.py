"""Evaluating at the clients, and what has to be gathered there before."""
