"""Whom an engine trusts: who has the key of its deployment, and KV of its own model."""
