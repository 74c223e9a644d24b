"""Decode a data set of prompts into a file of results."""
