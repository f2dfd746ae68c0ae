"""What holds for all tests."""

import pytest


def pytest_collection_modifyitems(items):
    """Mark the doctests as `rounding`: they print numbers."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.rounding)
