"""Tables and plots from the records of runs, and progress while one is under way."""
