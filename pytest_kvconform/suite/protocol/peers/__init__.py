"""Cases about the worker half of a connector among peers: lost peers, leases, and the ranks of one engine."""
