"""Figures of a result: one module per kind, and the modules that they share."""
