"""Fixtures that several tests of stores need."""

import shutil
from pathlib import Path

import pytest

from tests.datasets import job


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return job.run(tmp_path_factory.mktemp("store"))


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made.path, tmp_path / "copy"))
