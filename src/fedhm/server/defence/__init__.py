"""Defence: what keeps a few hostile clients from spoiling what the others have learned."""
