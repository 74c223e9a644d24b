"""Drafters: sources of the draft tokens for a round."""
