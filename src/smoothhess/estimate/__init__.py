"""Sampled rows → the estimated Hessian with its error."""
