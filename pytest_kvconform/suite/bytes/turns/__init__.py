"""Cases about the turns of a conversation: D hands over to P what it has of the turn before."""
