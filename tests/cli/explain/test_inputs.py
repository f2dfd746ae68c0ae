"""--input: pictures, tables and arrays; what is read, in which units, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from smoothhess.cli.explain import csv_files, image_files, inputs, load_model, normalization, npy_files, target_class
from smoothhess.cli.explain.inputs import Reading

CPU = torch.device("cpu")


def model(forward_func, shape=None, dtype=torch.float64):
    return load_model.Model(load_model.OneTensor(forward_func, None), "model", shape, dtype, "")


def read(path, forward_func, shape=None, **how):
    return inputs.read([path], model(forward_func, shape), Reading(**how), CPU)


def flat(width, out=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(width, out)).double()


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_a_picture_becomes_numbers_between_0_and_1(here):
    pixels = np.asarray(Image.open("colour.png"))
    (found,) = read(here / "colour.png", flat(3 * 144))
    assert found.kind == "image"
    assert (found.name, found.title) == ("colour", "colour.png")
    np.testing.assert_allclose(found.values, pixels.transpose(2, 0, 1) / 255, atol=1e-7)  # pictures are read as float32


def test_colour_is_made_grey_where_the_model_wants_one_channel_and_that_is_said(here):
    (found,) = read(here / "colour.png", flat(144))
    assert found.values.shape == (1, 12, 12)
    assert found.picture.shape == (3, 12, 12)
    assert "converted to grey" in found.notes[0]
    (found,) = read(here / "grey.png", nn.Conv2d(3, 1, 12).double())
    assert found.values.shape == (3, 12, 12)
    assert "grey, in 3 channels" in found.notes[0]
    assert not read(here / "grey.png", flat(144))[0].notes


def test_deep_pictures_palettes_and_transparency(tmp_path):
    deep = np.array([[0, 65535], [32768, 1000]], dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    grey, colours = image_files.read(tmp_path / "deep.png")
    np.testing.assert_allclose(grey[0], deep / 65535, atol=1e-6)
    assert colours.shape == (3, 2, 2)
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    clear.save(tmp_path / "clear.png")
    colours, _ = image_files.read(tmp_path / "clear.png")
    assert colours[:, 0, 0].tolist() == [1, 0, 0]
    assert colours[:, 1, 1].tolist() == [1, 1, 1]
    clear.convert("RGB").convert("P").save(tmp_path / "palette.png")
    assert image_files.read(tmp_path / "palette.png")[0].shape == (3, 2, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pictures_of_no_known_range_are_refused(tmp_path, dtype):
    numbers = (200 * np.random.default_rng(0).random((8, 8))).astype(dtype)
    Image.fromarray(numbers).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=r"whose range is unknown: expected 8 or 16 bits.*numpy.save"):
        image_files.read(tmp_path / "x.tif")


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_are_read_as_they_are(tmp_path, ending):
    deep = np.array([[0, 65535], [32768, 1000]], dtype=np.uint16)
    extra = {"transparency": 0} if ending == "png" else {}
    Image.fromarray(deep).save(tmp_path / f"deep.{ending}", **extra)
    grey, _ = image_files.read(tmp_path / f"deep.{ending}")
    np.testing.assert_allclose(grey[0], deep / 65535, atol=1e-6)


@pytest.mark.parametrize("mode", ["P", "1"])
def test_palettes_are_resized_like_the_colours_they_stand_for(tmp_path, mode):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    few = noise.quantize(16) if mode == "P" else noise.convert("1")
    few.save(tmp_path / "few.png")
    few.convert("RGB" if mode == "P" else "L").save(tmp_path / "many.png")
    for found, expected in zip(
        *(image_files.read(tmp_path / f"{n}.png", (8, 8)) for n in ("few", "many")), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_grey_picture_with_a_transparent_level_stays_grey(tmp_path):
    Image.fromarray(np.array([[0, 100], [200, 50]], dtype=np.uint8)).save(tmp_path / "x.png", transparency=0)
    grey, colours = image_files.read(tmp_path / "x.png")
    assert (grey.shape, colours.shape) == ((1, 2, 2), (3, 2, 2))
    np.testing.assert_allclose(grey[0], np.array([[255, 100], [200, 50]]) / 255, atol=1e-6)


def test_a_picture_is_resized_only_when_asked(here):
    assert read(here / "grey.png", flat(30), size=(5, 6))[0].values.shape == (1, 5, 6)
    with pytest.raises(ValueError, match=r"12 × 12 pixels, but the model takes 1 × 5 × 6. Resize it with --size 5x6"):
        read(here / "grey.png", flat(30), shape=(1, 5, 6))
    with pytest.raises(ValueError, match="The image was not resized: pass --size"):
        read(here / "grey.png", flat(30))


def test_a_model_that_fails_for_another_reason_is_not_told_to_resize(here):
    def fail(x):
        raise RuntimeError("no luck")

    with pytest.raises(ValueError, match=r": no luck\.$"):
        read(here / "grey.png", fail)


def test_an_export_of_plain_pixels_gets_grey_ones(here):
    (found,) = read(here / "colour.png", lambda x: x.sum((1, 2)), shape=(12, 12))
    assert found.values.shape == (12, 12)


def test_broken_pictures_are_refused(here):
    (here / "half.png").write_bytes((here / "colour.png").read_bytes()[:100])
    with pytest.raises(ValueError, match="not an image that pillow can read"):
        read(here / "half.png", flat(144))


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_row_is_explained_in_standard_deviations_and_the_model_gets_the_numbers_of_the_file(here):
    net = flat(4)
    raw = np.genfromtxt("data.csv", delimiter=",", skip_header=1)[:, :4]
    found = read(here / "data.csv", net, drop=["label"], rows="3,0")
    assert [e.name for e in found] == ["data-row3", "data-row0"]
    assert found[0].names == ("age", "dose", "height", "time")
    np.testing.assert_allclose(found[0].values, ((raw - raw.mean(0)) / raw.std(0, ddof=1))[3], atol=1e-12)
    np.testing.assert_allclose(found[0].original, raw[3])
    torch.testing.assert_close(found[0].forward_func(found[0].values[None]), net(torch.from_numpy(raw[3:4])))
    assert "one standard deviation of its column over the 20 rows of data.csv" in found[0].units
    plain = read(here / "data.csv", net, drop=["label"], rows="3", standardize=False)[0]
    np.testing.assert_allclose(plain.values, raw[3])
    assert plain.units == ""


def test_normalisation_comes_between_the_file_and_the_model(here):
    net, mean, std = flat(4), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0])
    raw = torch.from_numpy(np.genfromtxt("data.csv", delimiter=",", skip_header=1)[:1, :4])
    for standardize in (True, False):
        (found,) = read(
            here / "data.csv", net, drop=["label"], rows="0", mean=mean, deviation=std, standardize=standardize
        )
        torch.testing.assert_close(found.forward_func(found.values[None]), net((raw - mean) / std))


def test_the_first_rows_are_explained_by_default_and_that_is_said(here):
    found = read(here / "data.csv", flat(5))
    assert len(found) == 5
    assert found[0].notes == ("data.csv: the first 5 of 20 rows; choose others with --rows",)


def test_columns_that_do_not_vary_get_no_noise_and_that_is_said(tmp_path):
    (tmp_path / "x.csv").write_text("a,b,c\n1,0.1,5\n2,0.1,7\n3,0.1,1\n")
    found = read(tmp_path / "x.csv", flat(3))[0]
    assert found.still.tolist() == [False, True, False]
    assert found.notes[0] == "x.csv: no noise in b: it does not vary in the file"


def test_separators_and_byte_order_marks(tmp_path):
    for text in ("a;b\n1;2\n3;4\n", "\ufeffa\tb\n1\t2\n3\t4\n\n", 'a,"b"\n1, 2\n3,4.0\n'):
        (tmp_path / "x.csv").write_text(text, encoding="utf-8")
        table = csv_files.read(tmp_path / "x.csv")
        assert table.names == ("a", "b")
        assert table.values.tolist() == [[1, 2], [3, 4]]


def test_empty_rows_keep_their_number_and_blank_lines_have_none(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n,\n\n  \n5,6\n,\n\n")
    table = csv_files.read(tmp_path / "x.csv")
    assert table.values[[0, 2]].tolist() == [[1, 2], [5, 6]]
    assert len(table.values) == 3
    with pytest.raises(ValueError, match="row 1, column 'a' is empty"):
        table.row(1)


def test_missing_cells_count_only_in_rows_that_are_explained(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\nNA,4\n5,7\n")
    table = csv_files.read(tmp_path / "x.csv")
    mean, deviation = table.moments()
    assert mean.tolist() == pytest.approx([3, 13 / 3])
    assert deviation.tolist() == pytest.approx([np.std([1, 5], ddof=1), np.std([2, 4, 7], ddof=1)])
    with pytest.raises(ValueError, match="row 1, column 'a' is empty or NaN"):
        read(tmp_path / "x.csv", flat(2), rows="1")


@pytest.mark.parametrize(
    ("text", "how", "words"),
    [
        ("a,b\n1,2\n1,red\n", {}, "row 1, column 'b': expected a number, got text. Omit the column with --drop 'b'"),
        ("a,b\n1,2\n1_0,3\n", {}, "row 1, column 'a': expected a number, got text"),
        ("1,2\n3,4\n", {}, "the first line contains numbers"),
        ("a,b\n", {}, "1 line.s.: expected a header"),
        ("a,b\n1,2,3\n", {}, "row 0: 3 cells, but the header names 2"),
        ("a,a\n1,2\n", {}, "two columns have the name 'a'"),
        ("a,b\n1,2\n3,4\n", {"drop": ["c"]}, "--drop 'c': .* has no such column. Its columns are a, b.$"),
        ("age,b\n1,2\n3,4\n", {"drop": ["Age"]}, "--drop 'Age': .* columns are age, b. Did you mean age"),
        ("a;b\n1,5;2\n3;4\n", {}, "row 0, column 'a': got a decimal comma. Write numbers with a point"),
        ("a,b\n1,2\n3,4\n", {"drop": ["a,b"]}, "leaves no column"),
        ("a,b\n1,2\n3,4\n", {"rows": "7"}, "rows 0 … 1"),
        ("a,b\n1,2\n3,4\n", {"rows": "x"}, "--rows must be like 0:5"),
        ("a,b\n1,2\n3,4\n", {"rows": "5:9"}, "selects none"),
        ("a,b\n1,2\n", {}, "has one row.*--no-standardize"),
        ("a,b\n1,2\n1,2\n", {}, "all columns are constant"),
        (
            "a,b,c\n1,2,3\n3,4,5\n",
            {},
            "cannot be run on the 3 columns .* Omit the columns that it does not take, such as the label, with --drop",
        ),
    ],
)
def test_wrong_tables_are_refused(tmp_path, text, how, words):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x.csv", flat(2), **how)


def test_a_table_of_other_width_than_an_export_is_refused(here):
    with pytest.raises(ValueError, match=r"5 columns, but the model takes inputs of shape \(4,\)"):
        read(here / "data.csv", flat(4), shape=(4,))


# --- arrays -----------------------------------------------------------------------------------------------------------

CURVE = nn.Sequential(nn.Conv1d(1, 2, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(6, 2)).double()
IMAGE = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize(
    ("shape", "forward_func", "count", "one"),
    [
        ((6,), flat(6), 1, (6,)),
        ((5, 6), nn.Linear(6, 2).double(), 5, (6,)),  # also runs on one (5, 6), with an output (5, 2)
        ((400,), CURVE, 1, (1, 400)),
        ((1, 400), CURVE, 1, (1, 400)),
        ((3, 1, 400), CURVE, 3, (1, 400)),
        ((3, 400), CURVE, 3, (1, 400)),
        ((3, 16, 16), IMAGE, 1, (3, 16, 16)),
        ((2, 3, 16, 16), IMAGE, 2, (3, 16, 16)),
    ],
)
def test_arrays_with_and_without_examples_in_front(tmp_path, shape, forward_func, count, one):
    values = np.random.default_rng(0).normal(size=shape)
    np.save(tmp_path / "x.npy", values)
    found = read(tmp_path / "x.npy", forward_func)
    assert len(found) == count
    assert found[0].values.shape == one
    assert torch.equal(torch.stack([e.values for e in found]).reshape(-1), torch.from_numpy(values).reshape(-1))
    assert [e.name for e in found] == (["x"] if count == 1 else [f"x-{i}" for i in range(count)])


def test_what_an_array_is_taken_for_can_be_said(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(5, 6)))
    either = lambda x: x.flatten(1).sum(1) ** 2
    assert len(read(tmp_path / "x.npy", either)) == 1
    assert "accepts both, see --batched" in read(tmp_path / "x.npy", either)[0].notes[0]
    assert len(read(tmp_path / "x.npy", either, batched=True)) == 5
    assert len(read(tmp_path / "x.npy", either, batched=False)) == 1


def test_whole_numbers_and_booleans_are_numbers(tmp_path):
    np.save(tmp_path / "x.npy", np.array([1, 0, 1], dtype=np.int8))
    assert read(tmp_path / "x.npy", flat(3))[0].values.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.array([1.0, np.nan]), r"NaN or infinity, first at \(1,\)"),
        (np.array([1j]), "complex128: expected real numbers"),
        (np.array(["a"]), "expected real numbers"),
        (np.array({}, dtype=object), "holds pickled Python objects"),
        (np.zeros((0, 3)), "at least one number"),
        (np.array(3.0), "at least one number"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, values, words):
    np.save(tmp_path / "x.npy", values, allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        npy_files.read(tmp_path / "x.npy")


def test_wrong_channels_are_told_in_the_models_words(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 16, 16)))
    with pytest.raises(ValueError, match=r"x.npy of shape \(4, 16, 16\) as \(1, 4, 16, 16\): .*to have 3 channels"):
        read(tmp_path / "x.npy", IMAGE)


def test_an_array_that_does_not_fit_an_export_is_told_what_does(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 1, 40)))
    with pytest.raises(ValueError, match=r"x.npy has shape \(3, 1, 40\), but the model takes 3 × any × 16"):
        read(tmp_path / "x.npy", IMAGE, shape=(3, None, 16))


def test_an_array_that_fits_an_export_is_told_the_real_reason(tmp_path):
    def fail(x):
        raise RuntimeError("the sky is falling")

    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"x.npy of shape \(3,\) as \(1, 3\): the sky is falling"):
        read(tmp_path / "x.npy", fail, shape=(3,))


def test_a_damaged_array_is_refused(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match="is damaged or truncated"):
        npy_files.read(tmp_path / "x.npy")


# --- files in general -------------------------------------------------------------------------------------------------


def test_files_of_one_name_are_kept_apart(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "x.npy")
        np.save(paths[-1], np.ones(3))
    found = inputs.read(paths, model(flat(3)), Reading(), CPU)
    assert [e.name for e in found] == ["x", "x-2"]
    assert [e.title for e in found] == ["a/x.npy", "b/x.npy"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x-2", "a/x", "c/x"], ["x-2", "x", "x-3"]),
        (["a/x", "c/x", "x-2"], ["x", "x-2", "x-2-2"]),
        (["index", "x"], ["index-2", "x"]),
        (["a/x", "c/X"], ["x", "X-2"]),  # one file on disks that know no case
    ],
)
def test_no_example_overwrites_another_or_the_list_of_all(tmp_path, paths, names):
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{path}.npy", np.ones(3))
    found = inputs.read([tmp_path / f"{path}.npy" for path in paths], model(flat(3)), Reading(), CPU)
    assert [e.name for e in found] == names


def test_normalisation_from_a_file_and_by_channel(tmp_path):
    np.save(tmp_path / "m.npy", np.array([0.5, 0.25, 0.125]))
    mean = normalization.read_numbers([str(tmp_path / "m.npy")], "--mean")
    x = torch.rand(2, 3, 4, 4)
    found = normalization.normalised(lambda y: y, mean, torch.tensor([0.5]), (3, 4, 4))(x)
    torch.testing.assert_close(found, (x - mean.float()[:, None, None]) / 0.5)
    with pytest.raises(ValueError, match="--mean holds 3 numbers, but the inputs have 4 channels"):
        normalization.normalised(lambda y: y, mean, None, (4, 4, 4))


# --- targets ----------------------------------------------------------------------------------------------------------


def test_class_names_by_line_and_by_json(tmp_path):
    files = {
        "a.txt": "cat\ndog\nfox\n",
        "b.json": json.dumps(["cat", "dog", "fox"]),
        "c.json": json.dumps({"2": ["n3", "fox"], "0": ["n1", "cat"], "1": ["n2", "dog"]}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert target_class.read_classes(tmp_path / name) == ["cat", "dog", "fox"]
    (tmp_path / "d.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a json list"):
        target_class.read_classes(tmp_path / "d.json")


def test_targets_by_number_by_name_and_by_default():
    output, classes = torch.tensor([[0.1, 0.9, 0.3]]), ["cat", "dog", "fox"]
    assert target_class.find(None, output, None) == target_class.Target(1, "output 1", "the largest of 3 outputs")
    assert target_class.find(None, output, classes).name == "dog"
    assert target_class.find("fox", output, classes).index == 2
    assert target_class.find("FOX", output, classes) == target_class.Target(2, "fox", "set by --target")
    assert target_class.find("-1", output, classes).name == "fox"
    assert target_class.find("1,0", torch.zeros(1, 2, 3), None).index == (1, 0)
    for single in (torch.zeros(1), torch.zeros(1, 1)):
        assert target_class.find(None, single, None).index is None


@pytest.mark.parametrize(
    ("words", "shape", "classes", "says"),
    [
        ("3", (1, 3), None, "is out of range: expected 0 … 2"),
        ("dgo", (1, 3), ["cat", "dog", "fox"], "no such class. Did you mean dog"),
        ("xyzw", (1, 3), ["cat", "dog", "fox"], "no such class. The classes are cat, dog, fox"),
        ("crane", (1, 3), ["crane", "dog", "crane"], "classes 0, 2 share this name. Pass a class number"),
        ("dog", (1, 3), None, "expected the number of an output"),
        ("1", (1,), None, "a single output"),
        (None, (1, 3, 3), None, "select an entry with --target 0,0"),
        ("1", (1, 3, 3), None, r"expected 2 number\(s\)"),
        (None, (1, 3), ["cat"], r"names 1 classes, but the model's output has shape \(3,\)"),
    ],
)
def test_wrong_targets_are_refused(words, shape, classes, says):
    with pytest.raises(ValueError, match=says):
        target_class.find(words, torch.zeros(shape), classes)


def test_probabilities_are_recognised():
    assert target_class.look_like_probabilities(torch.tensor([[0.2, 0.8]]))
    assert not target_class.look_like_probabilities(torch.tensor([[-0.2, 1.2]]))
    assert not target_class.look_like_probabilities(torch.tensor([[1.0]]))
