"""Evaluation of explanations against the model: surrogates, attacks, sanity checks, scale sweeps and data sets.

Baselines that SmoothHess is compared with belong in `smoothhess.baselines`.
"""

from smoothhess.evaluate.across_models import ModelAgreement, StablePair, across_models
from smoothhess.evaluate.attack import AttackPath, attack, margin
from smoothhess.evaluate.attack_comparison import AttackComparison, AttackDifference, post_hoc
from smoothhess.evaluate.compare_methods import MethodComparison, compare_methods
from smoothhess.evaluate.compare_results import ComparedPair, ResultComparison, compare_results
from smoothhess.evaluate.compare_surrogates import Average, Comparison, Difference, compare
from smoothhess.evaluate.discover import Discoveries, Discovery, discover
from smoothhess.evaluate.gaussian_knockoffs import GaussianKnockoffs
from smoothhess.evaluate.global_interactions import global_interactions
from smoothhess.evaluate.global_summary import GlobalInteractions
from smoothhess.evaluate.joint_removal import JointRemoval, joint_removal
from smoothhess.evaluate.perturbation_mse import perturbation_mse
from smoothhess.evaluate.sanity import Check, Sanity, sanity
from smoothhess.evaluate.selection import Selection, select, select_radii
from smoothhess.evaluate.smallest_flip import Flip, smallest_flip
from smoothhess.evaluate.sweep import Change, Curve, Sweep, sweep
from smoothhess.evaluate.validate_pairs import Validation, validate_pairs
from smoothhess.result.minimize_in_ball import kkt_residual, minimize_in_ball

__all__ = [
    "AttackComparison",
    "AttackDifference",
    "AttackPath",
    "Average",
    "Change",
    "Check",
    "ComparedPair",
    "Comparison",
    "Curve",
    "Difference",
    "Discoveries",
    "Discovery",
    "Flip",
    "GaussianKnockoffs",
    "GlobalInteractions",
    "JointRemoval",
    "MethodComparison",
    "ModelAgreement",
    "ResultComparison",
    "Sanity",
    "Selection",
    "StablePair",
    "Sweep",
    "Validation",
    "across_models",
    "attack",
    "compare",
    "compare_methods",
    "compare_results",
    "discover",
    "global_interactions",
    "joint_removal",
    "kkt_residual",
    "margin",
    "minimize_in_ball",
    "perturbation_mse",
    "post_hoc",
    "sanity",
    "select",
    "select_radii",
    "smallest_flip",
    "sweep",
    "validate_pairs",
]
