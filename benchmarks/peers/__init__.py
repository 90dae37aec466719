"""One workload in fedhm, pfl-research and Flower: each is a process that does a round whenever it is told to."""
