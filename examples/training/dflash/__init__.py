"""Blocks for the training of DFlash heads, `training/train_dflash.py`."""
