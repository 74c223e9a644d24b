"""Checks of the devices at hand: `hf-speculate doctor`."""
