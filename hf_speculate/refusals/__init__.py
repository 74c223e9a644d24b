"""What cannot be decoded speculatively is refused before any model runs."""
