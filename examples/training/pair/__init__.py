"""Stages of the bundled pair's training, `training/train_pair.py`: one module each."""
