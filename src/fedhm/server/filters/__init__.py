"""The concerns of a round, a file each: `filter.py` says what a filter is, and in which order they run."""
