"""Judging updates by each other: what goes along with the others, and rules over all of a round."""
