"""Logical coordinates of KV: compare what stands in a cache with what should, and say where it came from. NumPy only."""
