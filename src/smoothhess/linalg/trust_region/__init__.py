"""The lowest point of a quadratic in a ball, from matrices and from products with them."""
