"""The data sets known by name, a file for each."""
