"""Data sets read whole into memory, and how they are dealt out to clients."""
