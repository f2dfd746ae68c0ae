"""N(0, Σ) and where to sample it: Gaussians, designs, random streams."""
