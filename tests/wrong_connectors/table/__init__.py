"""The records of the connectors, by theme: class, cell, and what must be found."""
