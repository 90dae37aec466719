"""Models that ship: a tier's network as a file that a device's runtime reads, checked by that runtime."""
