"""Stages for the training of the bundled pair, `training/train_pair.py`, one per module."""
