"""The command line `hf-speculate`."""
