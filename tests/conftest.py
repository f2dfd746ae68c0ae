"""What holds for all tests."""

import numpy as np
import pytest
import torch


def pytest_collection_modifyitems(items):
    """Mark the doctests as `rounding`: they print numbers."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.rounding)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(request):
    """Seed the generator RNG of the test's module, whichever of its tests this process ran before."""
    module = getattr(request.node, "module", None)  # None: a doctest
    if module is None:
        return
    rng = getattr(module, "RNG", None)
    if isinstance(rng, torch.Generator):
        rng.manual_seed(1)
    elif isinstance(rng, np.random.Generator):
        module.RNG = np.random.default_rng(1)
