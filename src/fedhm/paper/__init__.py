"""Every table and figure of the FedHM paper, with our numbers beside the paper's: `fedhm paper`."""
