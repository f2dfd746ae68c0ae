"""Batched numerics that know nothing of the method: products, low-rank matrices, eigenpairs, trust regions, memory."""
