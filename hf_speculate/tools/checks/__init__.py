"""Tools that tell, before and after decoding, whether speculation is worth it and right."""
