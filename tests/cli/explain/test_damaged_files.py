"""Random damage of valid files: every reader raises an error that names the file, and nothing else."""

import contextlib
import re

import pytest

from tests import damage
from tests.fuzz.loaders import READERS, valid_inputs

MUTATIONS = 2  # of each kind of damage; `make fuzz` tries more


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return valid_inputs(tmp_path_factory.mktemp("valid"))


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_raise_an_error_that_names_them(valid, tmp_path, name):
    path, canary = tmp_path / name, tmp_path / "canary"
    kinds = damage.mutations("x" if name == "legacy.pth" else name, str(canary))
    for kind, change in kinds.items():
        for number in range(MUTATIONS):
            path.write_bytes(change(damage.seeded(name, kind, number), valid[name]))
            with contextlib.suppress(ValueError):  # what is still valid is read
                READERS[name](path)
                continue
            with pytest.raises(ValueError, match=re.escape(name)):
                READERS[name](path)
    assert not canary.exists()


@pytest.mark.parametrize("name", sorted(set(READERS) - {"model.pth"}))
def test_valid_files_are_read(valid, tmp_path, name):
    (tmp_path / name).write_bytes(valid[name])
    READERS[name](tmp_path / name)
