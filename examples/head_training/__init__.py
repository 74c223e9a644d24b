"""Stages of `examples/train_head.py`, one module each."""
