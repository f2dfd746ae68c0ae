"""Gaussians N(0, Σ), designs that draw from them, and random streams."""
