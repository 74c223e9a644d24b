"""KV caches with rollback by row."""
