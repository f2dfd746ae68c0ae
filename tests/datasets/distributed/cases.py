"""Runs that a single process and many processes must agree on; each is a function of who explains."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from smoothhess import Diagonal, NeuronSmoothHess, SmoothHess
from smoothhess.curvature import control_variate, neuron_selection, one_flip
from smoothhess.linalg.memory import ByteLimit

D = 12
RNG = torch.Generator().manual_seed(3)
X = torch.randn(3, D, generator=RNG, dtype=torch.float64)
MASK = torch.arange(D) % 4


def network(seed=0, d=D):
    torch.manual_seed(seed)
    layers = [nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double().eval()


class Counter(nn.Module):
    """Counts the rows that it is called with."""

    def __init__(self):
        super().__init__()
        self.net, self.rows = network(), 0

    def forward(self, x):
        self.rows += len(x)
        return self.net(x)


class TwoPaths(nn.Module):
    """On the ranks where `cut` is true, large batches are evaluated in two halves: the frozen model loses its way."""

    def __init__(self, cut, most=8):
        super().__init__()
        self.net, self.cut, self.most = network(), cut, most

    def forward(self, x):
        if self.cut and len(x) > self.most:
            return torch.cat([self.net(x[:4]), self.net(x[4:])])
        return self.net(x)


def plain(explain, rank, device="cpu", **options):
    return explain(SmoothHess(network().to(device)), X.to(device), target=[0, 1, 2], sigma=0.2, **options)


# name → options; what is left out is the default
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sampled": {"control": None, "n_calls": 60},
    "kink": {"control": "kink", "n_calls": 50},
    "tau": {"control": "kink", "n_calls": 60, "tau_probes": 16},
    "adaptive": {"control": None, "tol": 0.15, "max_calls": 4000},
    "groups": {"feature_mask": MASK},
    "groups of each": {"feature_mask": torch.stack([MASK, MASK.flip(0), MASK // 2]), "n_calls": 40},
    "groups, sampled": {"feature_mask": MASK, "control": None, "n_calls": 5000},
    "dense": {"control": None, "n_calls": 3000},  # more rows than the head keeps
    "own seeds": {"seed": [5, 6, 7], "n_calls": 30},
    "iid": {"design": "iid", "control": None, "n_calls": 45},
    "sobol": {"design": "sobol", "n_calls": 200},
    "one row": {"control": None, "n_calls": 2, "shrink": False},  # nothing is left for the second rank
    "unshrunk": {"shrink": False, "n_calls": 48},
    "unfinished": {"control": None, "tol": 0.01, "max_calls": 200},  # warns
}

CASES = {name: (lambda explain, rank, o=options: plain(explain, rank, **o)) for name, options in OPTIONS.items()}


def case(run):
    CASES[run.__name__.replace("_", " ")] = run
    return run


@case
def single_precision(explain, rank):
    return explain(SmoothHess(network().float()), X.float(), target=1, radius=1.0, n_calls=40)


@case
def one_input_with_frozen_columns(explain, rank):
    gaussian = Diagonal(torch.tensor([0.0, *[0.3] * (D - 1)]))
    return explain(SmoothHess(network()), X[:1], 1, gaussian=gaussian, n_calls=64)


@case
def neuron(explain, rank):
    net = network()
    return explain(NeuronSmoothHess(net, net[3]), X, 5, sigma=0.4, n_calls=40)


@case
def arguments(explain, rank):
    net, scale = network(), torch.tensor([1.0, 2.0, 3.0]).double()
    return explain(SmoothHess(lambda x, s: net(x)[:, 0] * s), X, None, scale, sigma=0.4, n_calls=40)


@case
def closed_form_in_a_few_directions(explain, rank):
    """As for photos, whose closed form is not kept as a matrix."""
    with patch.object(control_variate, "CONTROL_LIMIT", 8):
        return plain(explain, rank, control="kink", n_calls=40)


@case
def selected_neurons(explain, rank):
    """Of which the gradients of half are kept."""
    limit = ByteLimit(X.shape[1] * 8 * 20)
    with patch.object(one_flip, "NEURON_GRADIENTS", limit), patch.object(neuron_selection, "LEFT_OUT", 1.0):
        return plain(explain, rank, control="kink", n_calls=60)


@case
def another_path(explain, rank):
    """One rank alone cannot make its share of the closed forms: all go on without them."""
    return explain(SmoothHess(TwoPaths(rank == 1)), X, 1, sigma=0.4, n_calls=60)


@case
def another_path_later(explain, rank):
    """One rank alone meets a batch that the closed form cannot follow: all begin again without it."""
    return explain(SmoothHess(TwoPaths(rank == 1, most=13)), X, 1, sigma=0.2, n_calls=60)
