"""How good is an explanation: measured against the model itself."""

from smoothhess.evaluate.comparison import Average, Comparison, Difference, compare
from smoothhess.evaluate.perturbation import perturbation_mse

__all__ = ["Average", "Comparison", "Difference", "compare", "perturbation_mse"]
