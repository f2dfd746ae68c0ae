"""Results, the quantities that are computed from them, and their files.

Nothing in this package samples. `smoothhess.explainers` and `smoothhess.baselines` make results; the formulas of the
estimate and its variance are in `smoothhess.estimate`.
"""

from smoothhess.result import exact as exact  # they register how their files are read
from smoothhess.result import interactions as interactions
