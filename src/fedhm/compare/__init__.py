"""Several methods on the same data with the same seeds: what each is, running them, what may be compared."""

METHODS = "fedhm,heterofl,splitmix,fedavg,lowrank,slimmed"  # that are compared if nothing is said
TUNE_SHARE = 0.2  # of each client's samples, held out: a few hundred in small data sets, and most is left to train on
