"""Draw the packages of smoothhess in the order of data, with the imports between them, into docs/images/packages.svg.

    python docs/_sphinx/import_graph.py

Boxes are packages, with their inputs and outputs. An arc joins a package to one that it imports; its width is the
number of modules that import it.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

ROOT = Path(__file__).parents[2] / "src" / "smoothhess"
STEPS = {
    "linalg": ("arrays", "products, eigenpairs, minima in a ball"),
    "draws": ("Σ, seed, block", "points z with their weights"),
    "model": ("points, the user's model", "values and gradients"),
    "curvature": ("recorded activations", "closed-form Hessian, control variate"),
    "estimate": ("rows of draws and gradients", "Ĥ with its variance"),
    "result": ("statistics of a run", "pairs, groups, intervals, files"),
    "explainers": ("model, inputs, options", "an Interactions"),
    "baselines": ("model, inputs", "derivatives and attributions of other methods"),
    "evaluate": ("model, results", "errors, attacks, choices, summaries"),
    "datasets": ("model, a data set", "a store of records"),
    "view": ("a result", "figures and pages"),
    "cli": ("files, options", "folders of explanations"),
}


def edges() -> Counter[tuple[str, str]]:
    """Count the modules of one package that import from another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0]
        if package not in STEPS:
            continue
        named = {
            node.module.split(".")[1]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smoothhess.")
        }
        found.update((package, other) for other in named & STEPS.keys() if other != package)
    return found


def draw() -> Figure:
    """The picture."""
    rcParams["svg.fonttype"], rcParams["svg.hashsalt"] = "none", "smoothhess"
    order = list(STEPS)
    figure = Figure(figsize=(8.5, 6.6))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 8.5), ylim=(-0.1, len(order) * 0.54 + 0.1))
    ax.axis("off")
    height = {name: (len(order) - 1 - i) * 0.54 + 0.27 for i, name in enumerate(order)}
    for name, (given, made) in STEPS.items():
        y = height[name]
        box = FancyBboxPatch(
            (0.1, y - 0.19), 1.35, 0.38, boxstyle="round,pad=0.02", facecolor="#dbe9f6", edgecolor="#2166ac"
        )
        ax.add_patch(box)
        ax.text(0.78, y, name, ha="center", va="center", fontsize=11, weight="bold")
        ax.text(1.65, y, f"{given} → {made}", ha="left", va="center", fontsize=9, color="#333333")
    for (package, other), count in edges().items():
        a, b = height[package], height[other]
        backwards = order.index(other) > order.index(package)
        reach = 5.95 + 0.29 * abs(order.index(package) - order.index(other))
        curve = Curve([(5.85, a), (reach, a), (reach, b), (5.85, b)], [Curve.MOVETO, *[Curve.CURVE4] * 3])
        colour = "#b2182b" if backwards else "#4d4d4d"
        ax.add_patch(PathPatch(curve, facecolor="none", edgecolor=colour, linewidth=0.4 + 0.16 * count, alpha=0.55))
        ax.plot(5.85, b, marker="<", color=colour, markersize=4, alpha=0.8)
    ax.text(8.45, 0.02, "red: plot, report and _repr_html_", ha="right", va="bottom", fontsize=8, color="#b2182b")
    return figure


if __name__ == "__main__":
    draw().savefig(ROOT.parents[1] / "docs" / "images" / "packages.svg", metadata={"Date": None})
    print(dict(edges()))
