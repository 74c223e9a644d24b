"""Programs built on the public API."""
