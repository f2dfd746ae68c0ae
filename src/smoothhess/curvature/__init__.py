"""Closed-form curvature of the activations of a model, and the control variate made from it."""
