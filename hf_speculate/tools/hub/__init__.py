"""Repositories on the Hub that say how to decode."""
