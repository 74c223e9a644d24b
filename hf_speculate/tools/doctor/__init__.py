"""Check the devices of this machine: `hf-speculate doctor`."""
