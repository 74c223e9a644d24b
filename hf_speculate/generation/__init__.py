"""Validate and prepare calls to `generate()`."""
