"""The decoding loop, the batch and the call plan."""
