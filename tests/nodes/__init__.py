"""Engines on two nodes of a Ray cluster: two network namespaces of this machine, with an address each."""
