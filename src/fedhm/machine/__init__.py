"""What this computer has: cores, devices, threads, files."""
