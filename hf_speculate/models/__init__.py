"""Calls to transformers models: attention, compilation and exceptions by model type."""
