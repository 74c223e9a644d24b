"""The decoding loop, the batch, and what one call decides."""
