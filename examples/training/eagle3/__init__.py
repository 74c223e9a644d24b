"""Text and draft steps of the EAGLE-3 head's training, `training/train_eagle3.py`."""
