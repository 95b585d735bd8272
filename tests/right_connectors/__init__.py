"""Right connectors of unusual designs: each conforms, and its docstring says what is unusual."""
