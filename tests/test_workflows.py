"""The workflows of the repository call the targets of the Makefile, and the same ones as .ci/run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LEAST_TARGETS = 8

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")


def run_by_ci():
    """The targets of .ci/run and their minutes."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    return {line.split()[2]: int(line.split()[1]) for line in lines if re.match(r"within \d", line)}


def run_by_workflows():
    """The targets that workflows call, by name or from a matrix."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    called = {
        name for line in re.findall(r"run: make ([a-z -]+?)(?: #.*)?$", text, re.MULTILINE) for name in line.split()
    }
    return called | {name.strip() for line in re.findall(r"target: \[(.*)\]", text) for name in line.split(",")}


def prerequisites():
    """The targets of the Makefile, with the targets that each of them requires."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    rules = [re.match(r"([a-z-]+):(?!=)([^|]*)", line) for line in lines]
    return {rule[1]: rule[2].split() for rule in rules if rule}


def test_workflows_call_targets_that_exist():
    assert len(run_by_workflows()) >= LEAST_TARGETS
    assert run_by_workflows() <= prerequisites().keys()


def test_workflows_call_every_target_of_the_whole_check():
    rules, called = prerequisites(), run_by_workflows()
    missing = {target for target in run_by_ci() if target not in called and not set(rules[target]) <= called}
    assert not missing


def test_the_whole_check_stays_within_its_minutes():
    assert sum(run_by_ci().values()) == 75
