"""Check the devices of this machine, for `hf-speculate doctor`."""
