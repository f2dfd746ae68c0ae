"""The public names are promises; importing is cheap."""

import subprocess
import sys

import smoothhess

NAMES = [
    "ClosedForm",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Estimate",
    "Gaussian",
    "Interactions",
    "Isotropic",
    "NeuronSmoothHess",
    "Pair",
    "SmoothHess",
    "Store",
    "Taylor",
    "attack",
    "diagnose",
    "evaluate",
    "explain_dataset",
    "from_gradient",
    "minimize_in_ball",
    "perturbation_mse",
    "rivals",
    "smooth_hvp",
    "sweep",
]


def test_public_names_are_frozen():
    assert sorted(smoothhess.__all__) == sorted(NAMES)
    assert all(hasattr(smoothhess, name) for name in NAMES)


def test_members_of_a_result_are_frozen():
    promised = """inputs gradient hessian value output relative_error r2 n_calls n_passes converged seed gaussian stderr
    gradient_stderr groups row diagonal bilinear top_pairs eigh taylor calls_for to_scipy to save load cat plot merge
    shape dtype device design control shrink unbiased status""".split()
    fields = set(smoothhess.Interactions.__dataclass_fields__)
    assert [name for name in promised if name not in fields and not hasattr(smoothhess.Interactions, name)] == []


def test_import_pulls_in_no_plotting_or_command_line_package():
    code = (
        "import sys, smoothhess; print([m for m in ('matplotlib','plotly','cyclopts','sklearn') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
