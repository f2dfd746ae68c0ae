import json
import math
import os

import pytest
import torch

from paper.cells import Cells, write_atomically

KEY = {"method": "SH+SG", "epsilon": 0.25, "point": 3}


def test_floats_come_back_bit_for_bit_from_another_process(tmp_path):
    numbers = [0.1 + 0.2, 1e-300, math.pi, -0.0, float("inf"), 5e-324]
    Cells(tmp_path / "new" / "cells", {"seed": 0}).put(KEY, numbers)
    back = Cells(tmp_path / "new" / "cells", {"seed": 0}).get(KEY)
    assert [x.hex() for x in back] == [x.hex() for x in numbers]


def test_the_order_of_a_key_is_no_matter_but_its_content_is(tmp_path):
    cells = Cells(tmp_path, {})
    cells.put(KEY, 1)
    assert dict(reversed(KEY.items())) in cells
    assert {**KEY, "point": 4} not in cells
    assert {**KEY, "epsilon": 0.5} not in cells
    assert cells.get({"point": 4}) is None
    assert cells.get({"point": 4}, "nothing") == "nothing"


def test_a_run_that_was_stopped_makes_only_what_is_missing(tmp_path):
    made = []

    def run(stop_after=None):
        cells = Cells(tmp_path, {"seed": 0})
        for k in range(6):

            def make(k=k):
                if len(made) == stop_after:
                    raise KeyboardInterrupt
                made.append(k)
                return k**2

            assert cells.compute({"k": k}, make) == k**2
        return cells

    with pytest.raises(KeyboardInterrupt):
        run(stop_after=4)
    assert made == [0, 1, 2, 3]
    cells = run()
    assert made == [0, 1, 2, 3, 4, 5]
    assert len(cells) == 6
    assert sorted((key["k"], value) for key, value in cells) == [(k, k**2) for k in range(6)]


def test_none_is_a_value(tmp_path):
    cells = Cells(tmp_path, {})
    made = []
    for _ in range(2):
        assert cells.compute(KEY, lambda: made.append(1)) is None
    assert made == [1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 1, "calls": [10, 20]}, "seed is 0 there and 1 now"),
        ({"seed": 0, "calls": (10, 30)}, r"calls is \[10, 20\] there and \[10, 30\] now"),
        ({"seed": 0}, r"calls is \[10, 20\] there and None now"),
        ({"seed": 0, "calls": (10, 20), "quick": True}, "quick is None there and True now"),
        ({"seed": 2, "calls": ()}, r"calls is .*; seed is"),
    ],
)
def test_other_settings_raise_with_their_name(tmp_path, settings, words):
    Cells(tmp_path, {"seed": 0, "calls": (10, 20)}).put(KEY, 1)
    Cells(tmp_path, {"calls": [10, 20], "seed": 0})  # the same ones
    with pytest.raises(ValueError, match=words + r".* Pass another --out, or remove the folder"):
        Cells(tmp_path, settings)
    assert Cells(tmp_path, {"seed": 0, "calls": (10, 20)}).get(KEY) == 1


def test_two_processes_may_share_a_folder(tmp_path):
    one, other = Cells(tmp_path, {"seed": 0}), Cells(tmp_path, {"seed": 0})
    one.put({"k": 1}, "one")
    other.put({"k": 2}, "other")
    assert (one.get({"k": 2}), other.get({"k": 1})) == ("other", "one")


def test_a_cell_is_written_atomically(tmp_path, monkeypatch):
    cells = Cells(tmp_path, {})
    before = sorted(tmp_path.iterdir())

    def broken(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(OSError, match="no space"):
            cells.put(KEY, 1)
    with pytest.raises(TypeError, match=r"pass \.tolist\(\) of a tensor"):
        cells.put(KEY, torch.zeros(2))
    with pytest.raises(TypeError, match="keys and settings hold strings"):
        cells.get({"sigma": torch.tensor(1.0)})
    assert sorted(tmp_path.iterdir()) == before
    assert KEY not in cells


def test_a_damaged_file_is_named(tmp_path):
    cells = Cells(tmp_path, {})
    cells.put(KEY, 1)
    (path,) = tmp_path.glob("cell-*.json")
    assert json.loads(path.read_text())["key"] == KEY  # the file contains its key
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match=f"{path.name} is damaged .* remove it"):
        cells.get(KEY)


def test_text_replaces_text(tmp_path):
    path = tmp_path / "a" / "b.md"
    write_atomically("one", path)
    assert write_atomically("two · ε", path) == path
    assert path.read_text(encoding="utf-8") == "two · ε"
    assert [p.name for p in path.parent.iterdir()] == ["b.md"]
