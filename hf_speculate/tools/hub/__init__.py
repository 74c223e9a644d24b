"""Writes repositories for the Hugging Face Hub."""
