"""Benchmarks decoding methods of a pair of models against each other."""
