"""Small results to draw, and how to read numbers back from a drawing."""

from functools import lru_cache

import numpy as np
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import nn

import smoothhess as sh

NAMES = ["age", "dose", "height", "pulse", "iron", "sleep"]


def one_pair(x):
    """Features 0 and 1 interact, the others are additive."""
    return torch.relu(x[:, 0] - x[:, 1]) * 2 + torch.relu(x[:, 2:]).sum(1)


@lru_cache
def network(shape, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        d = int(np.prod(shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, 1)).double()


@lru_cache  # results are frozen
def table(n_calls=400, **options):
    inputs = torch.tensor([[0.0] * 6, [0.3, 0.2, -0.1, 0.0, 0.1, 0.2]], dtype=torch.float64)
    gaussian = sh.Diagonal([0.5, 1, 1, 1, 2, 1])
    return sh.SmoothHess(one_pair).attribute(inputs, gaussian=gaussian, n_calls=n_calls, **options)


@lru_cache
def picture(shape=(4, 5), n_calls=200, **options):
    inputs = torch.rand(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return sh.SmoothHess(network(shape)).attribute(inputs, sigma=0.5, n_calls=n_calls, **options)


def segments(shape=(3, 4, 5)):
    """Four segments of a 4 × 5 image."""
    return torch.tensor([[0, 0, 1, 1, 1]] * 2 + [[2, 2, 2, 2, 3]] * 2).expand(shape)


class NoLayout(ConstrainedLayoutEngine):
    """Takes the settings of a layout and leaves all Axes where they are."""

    def execute(self, fig):
        pass


def without_layout(width, height):
    """In the place of `canvas.new_figure`."""
    return Figure(figsize=(width, height), layout=NoLayout())


def draw(ax):
    ax.figure.savefig("/dev/null", format="png")


def line_segments(ax):
    return [np.array(c.get_segments()) for c in ax.collections if isinstance(c, LineCollection)]


def dots(ax):
    return [c for c in ax.collections if isinstance(c, PathCollection)]


def unbiased_noise(value, stderr):
    return (np.abs(value) < 2 * stderr) | (value == 0)
