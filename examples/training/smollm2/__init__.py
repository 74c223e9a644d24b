"""Stages for training the head for SmolLM2, `training/train_smollm2_head.py`, one per module."""
