"""The source tree: packages in the order of data, imports in one direction, each file name once."""

import ast
import re
from collections import Counter
from pathlib import Path

import smoothhess

ROOT = Path(smoothhess.__file__).parent
ORDER = "_version linalg draws model curvature estimate result explainers baselines evaluate datasets view cli".split()
# Methods that show a result: each imports `view` when it is called.
FACADES = {
    ("result.result", "plot"),
    ("result.result", "report"),
    ("result.result", "_repr_html_"),
    ("result.result", "show"),
    ("evaluate.across_models", "plot"),
    ("evaluate.compare_results", "plot"),
    ("evaluate.compare_results", "report"),
    ("evaluate.global_summary", "plot"),
    ("evaluate.global_summary", "report"),
    ("evaluate.selection", "plot"),
    ("evaluate.sweep", "plot"),
    ("evaluate.validate_pairs", "plot"),
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(tree, inside=""):
    """Every import of the package: module, name, and the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        here = node.name if isinstance(node, ast.FunctionDef) else inside
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "smoothhess":
            source = node.module.partition(".")[2]
            for alias in node.names:
                whole = f"{source}.{alias.name}".lstrip(".")
                yield (whole, "", inside) if whole in MODULES else (source, alias.name, inside)
        elif isinstance(node, ast.Import):
            yield from ((a.name.partition(".")[2], "", inside) for a in node.names if a.name.startswith("smoothhess"))
        yield from imports(node, here)


EDGES = {
    name: [
        e for e in imports(ast.parse(path.read_text())) if (name, e[2]) not in FACADES or not e[0].startswith("view")
    ]
    for name, path in MODULES.items()
}


def inner(name):
    """Whether a module belongs to one of the packages; the two at the top import from all of them."""
    return name not in ("", "__main__")


def test_every_module_is_in_a_package():
    assert {name.split(".")[0] for name in MODULES if inner(name)} == set(ORDER)
    assert sorted(path.stem for path in ROOT.glob("*.py")) == ["__init__", "__main__", "_version"]


def test_file_names_are_used_once():
    counts = Counter(path.stem for path in MODULES.values())
    assert not [name for name, count in counts.items() if count > 1 and name != "__init__"]


def test_imports_follow_the_order_of_the_packages():
    wrong = [
        f"{name} → {source or 'smoothhess'}"
        for name, found in EDGES.items()
        for source, _, _ in found
        if inner(name)
        if not source or ORDER.index(source.split(".")[0]) > ORDER.index(name.split(".")[0])
    ]
    assert not wrong


def test_no_module_imports_a_private_name_of_another():
    wrong = [f"{name}: {source}.{what}" for name, found in EDGES.items() for source, what, _ in found]
    assert not [line for line in wrong if re.search(r"\._(?!_)\w+$", line)]


FOREIGN = {"_replace", "_asdict", "_fields", "_modules", "_schema", "_version"}  # of named tuples and of torch


def test_no_module_reads_a_private_attribute_of_another():
    wrong = []
    for name, path in MODULES.items():
        tree = ast.parse(path.read_text())
        nodes = [*ast.walk(tree)]
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        own |= {
            node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        wrong += [
            f"{name}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and node.attr not in own | FOREIGN
        ]
    assert not wrong


def test_there_are_no_cycles():
    graph = {name: {source for source, _, _ in found if source != name} for name, found in EDGES.items() if inner(name)}
    packages = {name for name, path in MODULES.items() if path.stem == "__init__"}
    graph = {
        name: {s for s in found if not (s in packages and name.startswith(f"{s}."))} for name, found in graph.items()
    }
    while ready := [name for name, found in graph.items() if not found & graph.keys()]:
        for name in ready:
            del graph[name]
    assert not graph
