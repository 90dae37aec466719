"""What is learned: the loss, the metrics, and which of them is the headline."""
