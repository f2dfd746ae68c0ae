"""Models and inputs as files, in a folder that the command line is run in."""

import csv
import sys
import sysconfig
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess.cli.explain import model_hash, output_files

MODULE = """
import torch
from torch import nn


def table():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()


class Logits:
    def __init__(self, logits):
        self.logits, self.loss = logits, None


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = table()

    def forward(self, x):
        return Logits(self.net(x))


class Pair(Text):
    def forward(self, x):
        return self.net(x), x.sum(1)


def named():
    net = table()
    return lambda x: {"logits": net(x), "hidden": x}


def product(x):
    return 3 * x[:, 0] * x[:, 1] + x[:, 2]


def product_of_rows(x):
    return 3 * x[:, 0] * x[:, 1] + x[:, 2]


def curve():
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv1d(1, 4, 9, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 23, 1))


def pixels():
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def needs(width):
    return nn.Linear(width, 1)


class Wide(nn.Module):
    def __init__(self, width, height):
        super().__init__()


def broken():
    raise RuntimeError("no luck")


a_number = 3
"""


def convolution() -> nn.Module:
    """One channel, 12 × 12, five classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(54, 5)
        ).eval()


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The convolution exported for 4 rows at a time, and for any number of rows."""
    folder = tmp_path_factory.mktemp("exported")
    x = torch.zeros(4, 1, 12, 12)
    for name, dynamic in (("fixed", None), ("free", ({0: torch.export.Dim.AUTO},))):
        torch.export.save(torch.export.export(convolution(), (x,), dynamic_shapes=dynamic), folder / f"{name}.pt2")
    return folder


class OwnModules:
    """`sys.modules` without installed packages, which a hash skips after it has resolved their thousand paths."""

    get = sys.modules.get

    def values(self):
        installed = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
        return [m for m in list(sys.modules.values()) if not str(getattr(m, "__file__", "")).startswith(installed)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A clean folder to stand in, with a module mine.py, a table and a picture."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_hash, "sys", SimpleNamespace(modules=OwnModules()))
    (tmp_path / "mine.py").write_text(MODULE)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20, 4)) * [1, 10, 0.1, 5] + [0, 50, 1, -3]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "dose", "height", "time", "label"])
        writer.writerows([*map(repr, row), i % 3] for i, row in enumerate(rows.tolist()))
    Image.fromarray(rng.integers(0, 256, (12, 12), dtype=np.uint8)).save(tmp_path / "grey.png")
    Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(tmp_path / "colour.png")
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Without figures and pages, which have tests of their own and take most of the time."""
    monkeypatch.setattr(output_files, "draw", lambda *_: None)
    monkeypatch.setattr(output_files, "write_page", lambda q, r, m, path, remarks: path.write_text("a page"))
