"""How good is an explanation: measured against the model itself."""

from smoothhess.ball.minimum import kkt_residual, minimize_in_ball
from smoothhess.evaluate.attack import AttackPath, attack, margin
from smoothhess.evaluate.comparison import Average, Comparison, Difference, compare
from smoothhess.evaluate.contest import Contest, Contrast, post_hoc
from smoothhess.evaluate.flip import Flip, smallest_flip
from smoothhess.evaluate.perturbation import perturbation_mse
from smoothhess.evaluate.population import GlobalInteractions
from smoothhess.evaluate.records import global_interactions
from smoothhess.evaluate.rivalry import Rivalry, rivalry
from smoothhess.evaluate.sanity import Check, Sanity, sanity
from smoothhess.evaluate.selection import Selection, select, select_radii
from smoothhess.evaluate.sweep import Change, Curve, Sweep, sweep
from smoothhess.evaluate.validation import Validation, validate_pairs

__all__ = [
    "AttackPath",
    "Average",
    "Change",
    "Check",
    "Comparison",
    "Contest",
    "Contrast",
    "Curve",
    "Difference",
    "Flip",
    "GlobalInteractions",
    "Rivalry",
    "Sanity",
    "Selection",
    "Sweep",
    "Validation",
    "attack",
    "compare",
    "global_interactions",
    "kkt_residual",
    "margin",
    "minimize_in_ball",
    "perturbation_mse",
    "post_hoc",
    "rivalry",
    "sanity",
    "select",
    "select_radii",
    "smallest_flip",
    "sweep",
    "validate_pairs",
]
