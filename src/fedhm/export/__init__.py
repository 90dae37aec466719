"""Export of trained models: a tier's network as a file for a device, checked with the runtime of that device."""
