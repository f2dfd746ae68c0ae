"""Segments: masks that cover every feature once, shared by all channels, and their names."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess import segments
from smoothhess.result.segments import Segments

pytestmark = pytest.mark.rounding


def covers(found, shape):
    """Ids 0 … K−1, each used, all channels alike."""
    assert found.mask.shape == shape
    assert found.mask.dtype == torch.long
    assert found.mask.unique().tolist() == list(range(len(found)))
    assert int(found.sizes.sum()) == found.mask.numel()
    if len(shape) == 3:
        assert bool((found.mask == found.mask[:1]).all())


# --- super-pixels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 40, 60), (1, 40, 60), (40, 60), (5, 40, 60)])
def test_slic_covers_the_image_with_about_as_many_patches_as_asked(shape):
    coarse = torch.rand(1, shape[0] if len(shape) == 3 else 1, 4, 6, generator=torch.Generator().manual_seed(0))
    image = nn.functional.interpolate(coarse, size=shape[-2:], mode="bilinear").reshape(shape)
    found = segments.slic(image, 24)
    covers(found, shape)
    assert 12 <= len(found) <= 40
    assert found.names[3] == "segment 3"


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_slic_follows_the_edges_of_an_image_on_any_scale(channels):
    image = torch.zeros(channels, 40, 40)
    image[:, :, 17:] = 1.0  # an edge that no regular grid of 4 × 4 has
    for scaled in (image, 500 * image - 250):
        mask = segments.slic(scaled, 16).mask[0]
        assert not set(mask[:, :17].unique().tolist()) & set(mask[:, 17:].unique().tolist())


def noisy_picture():
    return torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_slic_of_a_small_noisy_image_is_more_compact():
    """With a compactness of 10 all patches of 16 × 16 random pixels are merged into one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 6 <= len(segments.slic(noisy_picture(), 12)) <= 24
    with pytest.warns(UserWarning, match="of 12 super-pixels.*larger compactness"):
        segments.slic(noisy_picture(), 12, compactness=1)


def test_channels_in_the_last_dimension_are_refused_by_slic():
    with pytest.raises(ValueError, match=r"channels of an image must come first.*\(16, 16, 3\).*permute\(2, 0, 1\)"):
        segments.slic(noisy_picture().permute(1, 2, 0), 4)


def test_segments_are_printed_in_one_line():
    cells = segments.grid((1, 8, 8), 4)
    assert repr(cells).startswith("Segments(16 segments of shape (1, 8, 8): cell (0, 0), cell (0, 1)")
    assert repr(cells).endswith(" …)")


def test_slic_of_a_blank_image_is_still_a_partition():
    covers(segments.slic(torch.zeros(3, 20, 20), 9), (3, 20, 20))


def test_without_scikit_image_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(ImportError, match="pip install scikit-image.*grid:14"):
        segments.slic(torch.zeros(8, 8), 4)


# --- grid, columns, windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 14, 21), (14, 21), (1, 15, 10)])
def test_grid_cells_are_rectangles_of_nearly_equal_size(shape):
    found = segments.grid(shape, (7, 5))
    covers(found, shape)
    assert len(found) == 35
    heights = {int((found.mask == i).reshape(-1, *shape[-2:])[0].any(1).sum()) for i in range(35)}
    assert max(heights) - min(heights) <= 1
    for i in (0, 17, 34):
        rows, columns = torch.nonzero((found.mask == i).reshape(-1, *shape[-2:])[0], as_tuple=True)
        area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert len(rows) == int(area)


def test_grid_of_a_row_of_numbers():
    assert segments.grid((10,), 3).mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_columns_keep_their_order_and_their_own_names():
    found = segments.columns(list("abcde"), {"vowels": ["a", "e"], "one": ["c"]})
    assert found.names == ("vowels", "b", "one", "d")
    assert found.mask.tolist() == [0, 1, 2, 3, 0]
    assert segments.columns(list("abc")).mask.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"g": ["a", "x"]}, "'x', which is not among a, b, c"),
        ({"g": ["a"], "h": ["a"]}, "in the groups 'g' and 'h'"),
        ({"b": ["a", "c"]}, "'b' is both a group and a column"),
    ],
)
def test_wrong_column_groups_are_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        segments.columns(list("abc"), groups)


def test_windows_are_in_seconds():
    found = segments.windows(600, 0.5, step=0.05)
    assert len(found) == 60
    assert found.sizes.tolist() == [10] * 60
    assert found.names[:2] == ("0–0.5 s", "0.5–1 s")
    assert found.names[-1] == "29.5–30 s"


def test_a_width_that_is_no_multiple_of_the_step_does_not_drift():
    found = segments.windows(1000, 0.25, step=0.1)  # 2.5 samples each
    assert len(found) == 400
    assert set(found.sizes.tolist()) == {2, 3}
    starts = torch.tensor([int(torch.nonzero(found.mask == i)[0]) for i in range(400)]).double()
    assert float((starts * 0.1 - torch.arange(400).double() * 0.25).abs().max()) <= 0.05 + 1e-9


def test_windows_are_shared_by_all_channels():
    found = segments.windows((12, 50), 10)
    covers(found, (12, 50))
    assert bool((found.mask == found.mask[:1]).all())


@pytest.mark.parametrize(("width", "step", "words"), [(0.01, 0.05, "shorter than the step"), (1, 0, "positive time")])
def test_wrong_windows_are_refused(width, step, words):
    with pytest.raises(ValueError, match=words):
        segments.windows(100, width, step)


# --- masks of the user's ----------------------------------------------------------------------------------------------


def test_mask_files_keep_the_ids_of_the_user(tmp_path):
    from PIL import Image

    ids = np.array([[0, 0, 7], [7, 200, 200]], dtype=np.uint8)
    np.save(tmp_path / "mask.npy", ids.astype(np.int32))
    Image.fromarray(ids).save(tmp_path / "mask.png")
    for name in ("mask.npy", "mask.png"):
        found = segments.from_mask(tmp_path / name, (3, 2, 3))
        covers(found, (3, 2, 3))
        assert found.mask[2].tolist() == [[0, 0, 1], [1, 2, 2]]
        assert found.names == ("segment 0", "segment 7", "segment 200")


def test_colours_of_a_picture_are_groups(tmp_path):
    from PIL import Image

    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    pixels[:, 2:] = (255, 0, 16)
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    found = segments.from_mask(str(tmp_path / "mask.png"))
    assert found.names == ("colour #000000", "colour #ff0010")
    assert found.mask.tolist() == [[0, 0, 1, 1]] * 4


@pytest.mark.parametrize(
    ("mask", "shape", "words"),
    [
        (np.zeros((3, 3)), None, "whole numbers"),
        (np.zeros((3, 3), int), (3, 4, 4), r"mask has shape \(3, 3\), but one input has \(3, 4, 4\)"),
        ("nowhere.npy", None, "no mask at nowhere.npy"),
    ],
)
def test_wrong_masks_are_refused(mask, shape, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        segments.from_mask(mask, shape)


def test_float_and_broken_mask_files_are_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros((2, 2)))
    (tmp_path / "x.png").write_text("no picture")
    for name, words in (("f.npy", "whole numbers"), ("x.png", "pillow can read")):
        with pytest.raises(ValueError, match=words):
            segments.from_mask(tmp_path / name)


def test_ids_that_do_not_fit_the_names_are_refused():
    with pytest.raises(ValueError, match=r"mask must use all ids 0 … 1"):
        Segments(torch.tensor([0, 2]), ("a", "b"))


# --- as feature_mask --------------------------------------------------------------------------------------------------


def test_segments_and_their_mask_are_feature_masks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    x = torch.randn(1, 3, 4, 4).double()
    cells = segments.grid((3, 4, 4), 2)
    options = {"sigma": 0.3, "n_calls": 200}
    by_mask = sh.SmoothHess(net).attribute(x, feature_mask=cells.mask, **options)
    by_record = sh.SmoothHess(net).attribute(x, feature_mask=cells, **options)
    assert torch.equal(by_mask.hessian, by_record.hessian)
    whole = sh.SmoothHess(net).attribute(x, shrink=False, **options)
    indicator = torch.nn.functional.one_hot(cells.mask.reshape(-1)).double()
    torch.testing.assert_close(whole.groups(cells).hessian[0], indicator.T @ whole.hessian[0] @ indicator)


# --- the words of the command line ------------------------------------------------------------------------------------


def test_words(tmp_path):
    image = torch.rand(3, 28, 28, generator=torch.Generator().manual_seed(1))
    (tmp_path / "groups.json").write_text(json.dumps({"g": ["a", "b"]}))
    np.save(tmp_path / "m.npy", np.arange(28 * 28).reshape(28, 28) // 98)
    assert len(segments.parse("grid:14", image)) == 196
    assert len(segments.parse("grid:7x14", image)) == 98
    assert len(segments.parse(f"mask:{tmp_path / 'm.npy'}", image)) == 8
    assert torch.equal(segments.parse("slic:20", image).mask, segments.slic(image, 20).mask)
    assert segments.parse("columns", torch.zeros(2), ["a", "b"]).names == ("a", "b")
    assert segments.parse(f"columns:{tmp_path / 'groups.json'}", torch.zeros(3), list("abc")).names == ("g", "c")
    assert segments.parse("window:0.5s", torch.zeros(1, 40), step=0.1).names[1] == "0.5–1 s"
    assert segments.parse("window:500ms", torch.zeros(1, 40), step=0.1).names[1] == "0.5–1 s"
    assert segments.parse("window:5", torch.zeros(1, 40), step=0.1).names[1] == "0.5–1 s"
    assert segments.parse("window:5", torch.zeros(1, 40)).names[1] == "5–10"
    assert segments.parse("none", image) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("slick:50", "segments can be slic:50"),
        ("grid", "segments can be slic:50"),
        ("grid:x", "whole number"),
        ("grid:1x2x3", "grid:14 or grid:7x14"),
        ("grid:0", "at least 1"),
        ("grid:99", "more than the 28"),
        ("slic:1000", "at most 784"),
        ("window:0.5s", "give --step"),
        ("window:abc", "window:0.5s, window:20ms or window:20"),
        ("columns", "csv with a header"),
        ("mask:nowhere.png", "no mask at"),
    ],
)
def test_wrong_words_are_refused_with_what_was_expected(words, says):
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        segments.parse(words, torch.zeros(1, 28, 28))
