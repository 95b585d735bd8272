"""`--kv-shard`, `kvconform matrix` and `kvconform merge`."""
