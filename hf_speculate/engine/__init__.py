"""The decoding loop, the batch, and the plan of a call."""
