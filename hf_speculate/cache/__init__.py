"""KV caches with per-row rollback."""
