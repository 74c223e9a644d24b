"""Training of the bundled pair and the bundled draft heads."""
