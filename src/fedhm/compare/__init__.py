"""Several methods on the same data with the same seeds: what each is, running them, what may be compared."""
