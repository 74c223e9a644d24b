"""From a `generate()` call to a validated, prepared call."""
