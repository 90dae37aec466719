"""What the command line does with Flower: showing a run until it has ended, and starting a federation."""
