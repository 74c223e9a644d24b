"""Repositories for the Hugging Face Hub."""
