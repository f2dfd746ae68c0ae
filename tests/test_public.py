"""The public names are promises; importing is cheap."""

import ast
import compileall
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import smoothhess

NAMES = [
    "ClosedForm",
    "Dense",
    "Diagonal",
    "Eigenbasis",
    "Attribution",
    "Embedded",
    "Exact",
    "Estimate",
    "Gaussian",
    "Interactions",
    "Interrupted",
    "Isotropic",
    "NeuronSmoothHess",
    "Pair",
    "SmoothHess",
    "Store",
    "Taylor",
    "TokenSmoothHess",
    "attack",
    "continuation",
    "contrast",
    "diagnose",
    "evaluate",
    "explain_dataset",
    "from_gradient",
    "from_sklearn",
    "minimize_in_ball",
    "perturbation_mse",
    "baselines",
    "segments",
    "smooth_hvp",
    "sweep",
]


def test_public_names_are_frozen():
    assert sorted(smoothhess.__all__) == sorted(NAMES)
    assert all(hasattr(smoothhess, name) for name in NAMES)


def test_every_name_is_imported_from_the_module_that_type_checkers_read():
    """The names that are imported at their first use stand twice in the file: for checkers, and for Python."""
    tree = ast.parse(Path(smoothhess.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(checked) == sorted(NAMES)
    for name, module in checked.items():
        found = getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")
        assert getattr(smoothhess, name) is found


def test_dir_shows_public_names_and_packages_only():
    packages = {path.parent.name for path in Path(smoothhess.__file__).parent.glob("*/__init__.py")}
    shown = {name for name in dir(smoothhess) if not name.startswith("_")}
    assert shown <= set(NAMES) | packages


def test_members_of_a_result_are_frozen():
    promised = """inputs gradient hessian value output relative_error r2 n_calls n_passes converged seed gaussian stderr
    gradient_stderr groups row diagonal bilinear top_pairs eigh taylor calls_for to_scipy to save load cat plot merge
    shape dtype device design control shrink unbiased status to_frame to_shapiq
    names eigh_residuals report gradient_estimate value_estimate""".split()
    fields = set(smoothhess.Interactions.__dataclass_fields__)
    assert [name for name in promised if name not in fields and not hasattr(smoothhess.Interactions, name)] == []


IMPORT = """
import gc, json, sys, time
gc.disable()  # torch's objects keep the collector busy wherever it strikes
start = time.process_time()
import torch
middle = time.process_time()
import pytest

import smoothhess
assert "smoothhess.explainers" not in sys.modules
smoothhess.SmoothHess  # imports the explainers
share = (time.process_time() - middle) / (middle - start)
library = list(sys.modules)
import smoothhess.cli.main, smoothhess.cli.demo
command_line = list(sys.modules)
from smoothhess.view.report import report
report(smoothhess.SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 3), sigma=1.0, n_calls=20), sys.argv[1])
print(json.dumps([share, library, command_line, list(sys.modules)]))
"""


def imported(page, installed):
    """Time of the import over that of torch; modules after it, after that of the command line, and after a page."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", IMPORT, page]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(run.stdout)


@pytest.fixture
def installed(tmp_path):
    """A folder with the package and its bytecode, as an installer leaves it; torch's bytecode exists already."""
    shutil.copytree(Path(smoothhess.__file__).parent, tmp_path / "installed" / "smoothhess")
    compileall.compile_dir(tmp_path / "installed", quiet=2)
    return tmp_path / "installed"


def test_import_pulls_in_no_plotting_or_command_line_package_and_adds_little_to_that_of_torch(tmp_path, installed):
    """A ratio, since machines differ; and a page needs torch and numpy only."""
    share, library, command_line, page = imported(tmp_path / "x.html", installed)
    assert (tmp_path / "x.html").is_file()
    assert not {"matplotlib", "plotly", "PIL", "skimage", "pandas"} & {*page}
    assert not {"matplotlib", "plotly", "cyclopts", "sklearn", "pandas", "skimage", "PIL", "scipy"} & {*library}
    assert not {"matplotlib", "cyclopts", "sklearn"} & {*command_line}
    taken = [share]
    while min(taken) >= 0.15 and len(taken) < 4:  # 0.04 to 0.11; a machine may be busy for one of them
        taken.append(imported(tmp_path / "x.html", installed)[0])
    assert min(taken) < 0.15


EVALUATE = """
    AttackComparison AttackDifference AttackPath Average Change Check ComparedPair Comparison Curve Difference
    Discoveries Discovery Flip GaussianKnockoffs GlobalInteractions JointRemoval MethodComparison ModelAgreement
    ResultComparison Sanity Selection StablePair Sweep Validation across_models attack compare compare_methods
    compare_results discover global_interactions joint_removal kkt_residual margin minimize_in_ball
    perturbation_mse post_hoc sanity select select_radii smallest_flip sweep validate_pairs
""".split()


def test_names_of_evaluate_are_frozen():
    assert sorted(smoothhess.evaluate.__all__) == sorted(EVALUATE)
    assert all(hasattr(smoothhess.evaluate, name) for name in EVALUATE)
