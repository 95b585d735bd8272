"""Cases about one half of a connector at a time: its class, its capabilities, its start and its shutdown."""
