"""A run of fedhm from a config."""
