"""Benchmark decoding methods for a pair of models against each other."""
