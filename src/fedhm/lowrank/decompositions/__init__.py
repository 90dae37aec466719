"""Decompositions of weights as matrices: exact ones, and those that start from the last round's."""
