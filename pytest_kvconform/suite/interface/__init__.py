"""Cases about one half of a connector at a time: how it is built, what it says of itself, how it starts and how it ends."""
