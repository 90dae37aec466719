"""Width: narrower versions of a network, made of some of its channels. Knows nothing of federation."""
