"""Connectors that contain others, as vLLM's MultiConnector: a right one, and wrong ones."""
