import csv
import math
from collections import Counter
from importlib import resources

import pytest

from paper.published import published

ROWS = list(csv.DictReader(resources.files("paper").joinpath("published.csv").read_text(encoding="utf-8").splitlines()))
KEY = ("metric", "dataset", "network", "function", "epsilon", "method")


def find(row, **other):
    return published(**{key: row[key] for key in KEY} | {"epsilon": float(row["epsilon"])} | other)


def test_every_row_is_found_as_it_stands():
    for row in ROWS:
        found = find(row)
        assert found is not None
        assert (found.value, found.note, found.unit) == (float(row["value"]), row["note"], row["unit"])
        assert found.n_points in (100, 200, 400)


def test_the_tables_are_complete():
    """7 rows of 18 cells and ResNet-101's 3 in mean and deviation; 6 of them have a parameter; attacks: 7 of 15, 4."""
    assert len({tuple(row[key] for key in KEY) for row in ROWS}) == len(ROWS)
    assert Counter(row["metric"] for row in ROWS) == {
        "pmse_mean": 7 * 21,
        "pmse_std": 7 * 21,
        "pmse_smoothing": 6 * 21,
        "attack_posthoc_accuracy": 7 * 15,
        "attack_smoothing": 4 * 15,
    }
    assert all(float(row["value"]) >= 0 and math.isfinite(float(row["value"])) for row in ROWS)


def test_smoothhess_is_printed_lowest_in_all_cells():
    cells = [row for row in ROWS if row["metric"] == "pmse_mean"]
    for row in cells:
        assert find(row, method="SH+SG").value <= float(row["value"])


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({}, 4.1e-05),
        ({"dataset": "mnist"}, 4.1e-05),
        ({"dataset": "FashionMNIST"}, 2.7e-05),
        ({"dataset": "fmnist", "function": "neuron"}, 9e-07),
        ({"epsilon": 0.1 + 0.4}, 4.1e-05),
        ({"metric": "pmse_smoothing"}, 1.8e-04),
    ],
)
def test_names_may_be_said_in_several_ways(changed, value):
    asked = {"metric": "pmse_mean", "dataset": "MNIST", "network": "mlp5", "function": "logit", "epsilon": 0.5}
    assert published(**asked | changed, method="SG").value == value


def test_what_was_not_printed_is_none_and_what_cannot_be_is_an_error():
    row = ROWS[0]
    assert find(row, epsilon=0.3) is None
    assert find(row, method="random") is None
    assert find(row, dataset="CIFAR10") is None  # of the MLP
    with pytest.raises(ValueError, match="dataset: expected one of cifar10, fmnist, mnist, got 'svhn'"):
        find(row, dataset="SVHN")
    with pytest.raises(ValueError, match="metric: expected one of"):
        find(row, metric="pmse")


def test_misprints_carry_a_note():
    gradient = [row for row in ROWS if row["method"] == "G" and row["metric"] == "pmse_mean"]
    assert len(gradient) == 21
    assert all("cannot be the gradient" in row["note"] for row in gradient)
    assert sum(bool(row["note"]) for row in ROWS) == 21 + 4
