"""FedHM on Flower, with your own model and data."""
