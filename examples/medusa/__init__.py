"""Medusa heads for the bundled target: trained by a script, used through `generate()`."""
