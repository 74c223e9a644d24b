"""Models, caches and the steps that run them."""
