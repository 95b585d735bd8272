"""Right connectors whose halves share their work in other ways than usual, and wrong ones beside them."""
