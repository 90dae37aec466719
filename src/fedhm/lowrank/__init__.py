"""Low-rank mathematics: decompositions, factorized layers, rank plans, hybrid networks. Knows nothing of federation."""
