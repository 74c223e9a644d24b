"""Drafters: what proposes the tokens of a round."""
