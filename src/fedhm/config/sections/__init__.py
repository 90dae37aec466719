"""The sections of a config, a file for each, and what all methods' and objectives' sections have."""
