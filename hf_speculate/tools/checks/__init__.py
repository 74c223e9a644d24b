"""Checks of a pair of models before decoding, and of its output after."""
