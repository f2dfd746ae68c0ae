"""Data sets, networks and training of the paper's experiments."""
