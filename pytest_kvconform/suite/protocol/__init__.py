"""Cases about the scheduler half of a connector without a worker, and about its worker half among peers."""
