"""Training outside of PyTorch: a network's training step as an ExecuTorch graph, checked gradient by gradient."""
