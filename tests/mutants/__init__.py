"""Define mutants: small faults that `make test` must find, one at a time."""
