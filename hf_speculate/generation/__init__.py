"""Validate and prepare calls of `generate()`."""
