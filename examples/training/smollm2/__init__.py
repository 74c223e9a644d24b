"""Stages of the training of SmolLM2's head, `training/train_smollm2_head.py`: one module each."""
