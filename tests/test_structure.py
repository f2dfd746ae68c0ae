"""Limits on the size of functions and classes, and language features that the source does not use."""

import ast
from pathlib import Path

import pytest

import smoothhess

ROOT = Path(smoothhess.__file__).parent
PAPER = Path(__file__).parents[1] / "paper"
MOST_PARAMETERS = 8
MOST_METHODS = 24

# "file: name". `Result` is the interface of all results, with short methods that call other modules; `make` is a
# public constructor, of `Exact` and `Attribution`.
KNOWN = {"result/exact.py: StoredResult.make", "result/result.py: Result"}
# Files that read the attributes of objects of the user.
READS_USER_OBJECTS = {"model/state.py", "cli/explain/load_model.py"}

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
TREES = {
    (path.relative_to(ROOT) if root == ROOT else path.relative_to(PAPER.parent)).as_posix(): ast.parse(path.read_text())
    for root in (ROOT, PAPER)
    for path in sorted(root.rglob("*.py"))
    if "tests" not in path.relative_to(root).parts
}


def definitions(tree, outer=""):
    """Every function and class with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            yield f"{outer}{node.name}", node
            yield from definitions(node, f"{outer}{node.name}.")
        else:
            yield from definitions(node, outer)


DEFINITIONS = [(file, name, node) for file, tree in TREES.items() for name, node in definitions(tree)]


def exported():
    """The names in `__all__` of the packages, and the functions that define commands of a command line."""
    names = set()
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and "__init__" in file:
                names |= set(ast.literal_eval(node.value))
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("app.command", "app.default"):
                names |= {argument.id for argument in node.args if isinstance(argument, ast.Name)}
    return names


def n_parameters(function):
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a]
    return sum(name not in ("self", "cls") for name in names)


def attributes(name):
    """The files in which an attribute of that name is read or written."""
    return {
        file
        for file, tree in TREES.items()
        if any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree))
    }


def long_functions():
    """Functions with many parameters that are neither exported nor methods of an exported class."""
    public = exported()
    return {
        f"{file}: {name}"
        for file, name, node in DEFINITIONS
        if isinstance(node, FUNCTIONS) and n_parameters(node) > MOST_PARAMETERS and name.split(".")[0] not in public
    }


def large_classes():
    return {
        f"{file}: {name}"
        for file, name, node in DEFINITIONS
        if isinstance(node, ast.ClassDef) and sum(isinstance(n, FUNCTIONS) for n in node.body) > MOST_METHODS
    }


def calls_of_locals():
    return {
        f"{file}:{node.lineno}: locals()"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "locals"
    }


def attribute_dictionaries():
    return {f"{file}: __dict__" for file in attributes("__dict__") - READS_USER_OBJECTS}


def computed_attributes():
    return {f"{file}: {name}" for file, name, _ in DEFINITIONS if name.endswith(".__getattr__")}


RULES = (long_functions, large_classes, calls_of_locals, attribute_dictionaries, computed_attributes)


@pytest.mark.parametrize("rule", RULES)
def test_rule_has_no_new_exceptions(rule):
    assert not rule() - KNOWN


def test_known_exceptions_are_still_needed():
    assert not KNOWN - set().union(*(rule() for rule in RULES))
