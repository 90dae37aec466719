"""Data sets read whole into memory, and partitioned over clients."""
