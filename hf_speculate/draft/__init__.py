"""Drafters: sources of a round's draft tokens."""
