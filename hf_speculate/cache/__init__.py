"""Caches that roll back row by row."""
