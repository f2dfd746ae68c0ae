"""The trust-region problem: minimise a quadratic over a ball, from dense matrices or matrix-vector products."""
