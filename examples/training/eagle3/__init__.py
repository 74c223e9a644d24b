"""Text and draft steps for the training of the EAGLE-3 head, `training/train_eagle3.py`."""
