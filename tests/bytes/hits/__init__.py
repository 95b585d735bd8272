"""Prompts of which D has the beginning."""
