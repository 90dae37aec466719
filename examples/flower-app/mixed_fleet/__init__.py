"""FedHM on Flower, with a model and data of one's own."""
