"""Measures methods to decode with a pair of models, side by side."""
