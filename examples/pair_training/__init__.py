"""Names the rooms of the pair's training: each module is one stage of `examples/train_pair.py`."""
