"""The files of runs: settings, records, checkpoints, models."""
