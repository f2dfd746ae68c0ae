"""Results of fixed seeds are what they were before the source tree was rearranged."""

import warnings

import torch
from safetensors.torch import load_file

from tests.golden.golden import FILE, compute

RTOL = 1e-10  # of the norm of each quantity
THROUGH_STUDENT = ("interval", "pairs")  # quantiles and p-values, whose implementation may change


def test_the_same_quantities_are_there_and_every_number_is_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numbers = compute()
    stored, wrong = load_file(FILE), {}
    assert numbers.keys() == stored.keys()
    for name, expected in stored.items():
        found, kept = numbers[name], expected.isfinite()
        if not torch.equal(found.isfinite(), kept) or not torch.equal(found.isnan(), expected.isnan()):
            wrong[name] = "not finite"
            continue
        rtol = 1e-8 if name.endswith(THROUGH_STUDENT) else RTOL
        off = float((found - expected)[kept].norm())
        if off > rtol * float(expected[kept].norm()) + 1e-13:
            wrong[name] = off
    assert not wrong
