"""What tests of figures may ask for."""

import pytest

from smoothhess.view.figures import canvas
from tests.view.pictures import without_layout


@pytest.fixture
def plain_figures(monkeypatch):
    """Figures without a layout engine, which takes most of the time and changes no number."""
    monkeypatch.setattr(canvas, "new_figure", without_layout)
