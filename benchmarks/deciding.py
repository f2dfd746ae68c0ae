"""Share of the time of an adaptive run that its error estimates take: python benchmarks/deciding.py.

A cheap model (a small MLP) and a dear one (a convolutional network, or a wide MLP for few features) are explained with
the default tolerance at several numbers of features d. Deciding is everything in the sampling loop except the
evaluation of rows; the closed form of the control variate counts to the total only.
"""

import argparse
import time
import warnings

import torch
from torch import nn

import smoothhess as sh
from smoothhess.explainers import adaptive
from smoothhess.explainers.sampler import Sampler

SIZES = {8: (8,), 64: (1, 8, 8), 784: (1, 28, 28), 3072: (3, 32, 32)}


class Clock:
    """Total time of all calls of a function."""

    def __init__(self, function):
        self.function, self.seconds = function, 0.0

    def __call__(self, *args, **options):
        start = time.perf_counter()
        try:
            return self.function(*args, **options)
        finally:
            self.seconds += time.perf_counter() - start


def cheap(d):
    """A small multilayer perceptron."""
    return nn.Sequential(nn.Flatten(), nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def dear(d):
    """A convolutional network, or a wide multilayer perceptron if the input is no image."""
    if len(SIZES[d]) == 1:
        return nn.Sequential(nn.Linear(d, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    layers = [nn.Conv2d(SIZES[d][0], 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def measure(d, model, **options):
    """Total time, seconds of deciding, calls, relative error and status of one run."""
    torch.manual_seed(0)
    model, x = model(d), torch.randn(1, *SIZES[d])
    model(x)
    rows, loop = Clock(Sampler.extend), Clock(adaptive.sample_until)
    before = Sampler.extend, adaptive.sample_until
    Sampler.extend = lambda *args, **kwargs: rows(*args, **kwargs)
    adaptive.sample_until = loop
    try:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = sh.SmoothHess(model).attribute(x, target=0, radius=1.0, **options)
        total = time.perf_counter() - start
    finally:
        Sampler.extend, adaptive.sample_until = before
    return total, loop.seconds - rows.seconds, int(result.n_calls), float(result.relative_error), result.status[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, nargs="+", default=[*SIZES], choices=[*SIZES])
    parser.add_argument("--tol", type=float, nargs="+", default=[0.1, 0.01])
    parser.add_argument("--model", nargs="+", default=["cheap", "dear"], choices=["cheap", "dear"])
    arguments = parser.parse_args()
    print("    d model    tol control   seconds deciding  calls   error status")
    for d in arguments.d:
        for model in [{"cheap": cheap, "dear": dear}[name] for name in arguments.model]:
            for tol in arguments.tol:
                for control in ("auto", None):
                    total, deciding, calls, error, status = measure(d, model, tol=tol, control=control)
                    run = f"{d:5} {model.__name__:6} {tol:5g} {control!s:8}"
                    print(f"{run} {total:8.2f} {deciding / total:8.0%} {calls:6} {error:7.2g} {status}", flush=True)
