"""What tests of figures may ask for."""

import pytest
from matplotlib.figure import Figure

from smoothhess.view import canvas


@pytest.fixture
def plain_figures(monkeypatch):
    """Figures without a layout engine, which takes most of the time and changes no number."""
    monkeypatch.setattr(canvas, "new_figure", lambda width, height: Figure(figsize=(width, height)))
