"""Objectives: the loss and the metrics of what is learned, one file each."""
