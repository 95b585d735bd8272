"""A connector that pushes: a right one, and wrong ones."""
