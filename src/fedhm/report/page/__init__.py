"""One page for runs and comparisons, `report.html`: it needs no network, and no scripts to be read."""
