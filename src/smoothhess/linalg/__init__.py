"""Batched linear algebra: Gram matrices, low-rank matrices, eigenpairs, trust regions and memory limits.

Nothing in this package depends on the estimator.
"""
