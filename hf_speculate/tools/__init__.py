"""Programs over the public API."""
