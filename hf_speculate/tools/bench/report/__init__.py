"""HTML report of a benchmark."""
