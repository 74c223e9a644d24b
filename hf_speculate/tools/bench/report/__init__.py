"""Pages that show what a benchmark measured."""
