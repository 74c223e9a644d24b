"""Check a pair of models before decoding, and its output afterwards."""
