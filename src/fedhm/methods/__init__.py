"""Federated methods behind one protocol (`method.py`), a file for each; a new file is a new method."""
