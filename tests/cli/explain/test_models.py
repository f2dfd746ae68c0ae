"""--model, --weights and --output: what is read, how it is run, and what is never opened."""

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from smoothhess.cli.explain import exported_models, load_model, model_factories, state_dict_files
from smoothhess.cli.explain.exported_models import InBatches
from smoothhess.cli.explain.load_model import OneTensor, OutputError
from tests.cli.explain.conftest import convolution

CPU = torch.device("cpu")


def load(words, weights=None, output=None):
    return load_model.load(words, weights, output, CPU, 0)


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_an_export_of_fixed_size_gives_values_and_gradients_for_any_number_of_rows(exported, rows):
    export, net = exported_models.read(exported / "fixed.pt2", CPU), convolution()
    assert (export.batch, export.shape, export.dtype) == (4, (1, 12, 12), torch.float32)
    x = torch.randn(rows, 1, 12, 12, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    torch.testing.assert_close(export.forward_func(x), net(x))
    weight = torch.arange(1.0, 6.0)
    (found,) = torch.autograd.grad((export.forward_func(x) * weight).sum(), x)
    (expected,) = torch.autograd.grad((net(x) * weight).sum(), x)
    torch.testing.assert_close(found, expected)


def test_an_export_of_free_size_is_run_as_it_is(exported):
    export = exported_models.read(exported / "free.pt2", CPU)
    assert export.batch is None
    x = torch.randn(7, 1, 12, 12)
    torch.testing.assert_close(export.forward_func(x), convolution()(x))


def test_an_export_with_a_range_of_sizes_is_kept_within_it(tmp_path):
    dynamic = ({0: torch.export.Dim("rows", min=2, max=5)},)
    net = nn.Linear(3, 2)
    torch.export.save(torch.export.export(net, (torch.zeros(3, 3),), dynamic_shapes=dynamic), tmp_path / "x.pt2")
    export = exported_models.read(tmp_path / "x.pt2", CPU)
    for rows in (1, 5, 6, 11):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(export.forward_func(x), net(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["fixed", "free"])
def test_an_export_follows_the_device(exported, name):
    export = exported_models.read(exported / f"{name}.pt2", torch.device("cuda"))
    x = torch.randn(5, 1, 12, 12)
    torch.testing.assert_close(export.forward_func(x.cuda()).cpu(), convolution()(x), rtol=1e-3, atol=1e-3)


def test_padding_never_reaches_the_outputs():
    sizes = []

    def model(x):
        sizes.append(len(x))
        return {"y": x.sum(1), "z": (x, None)}

    found = InBatches(model, 4, 4)(torch.arange(10.0).reshape(5, 2))
    assert sizes == [4, 4]
    assert found["y"].tolist() == [1, 5, 9, 13, 17]
    assert found["z"][0].shape == (5, 2)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_an_export_of_fixed_size_may_return_a_list_and_a_scalar(tmp_path, kind, rows):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, x):
            return kind([self.net(x), {"loss": x.square().sum(), "hidden": x}])

    net = Several()
    torch.export.save(torch.export.export(net, (torch.zeros(4, 3),)), tmp_path / "x.pt2")
    x = torch.randn(rows, 3)
    found = exported_models.read(tmp_path / "x.pt2", CPU).forward_func(x)
    torch.testing.assert_close(found[0], net.net(x))
    assert torch.equal(found[1]["hidden"], x)
    assert found[1]["loss"].ndim == 0
    model = load(str(tmp_path / "x.pt2"), output="0")
    torch.testing.assert_close(model.forward_func(x), net.net(x))
    assert model.try_on(x) == ("", 2)


def test_an_output_that_is_not_one_per_row_is_not_cut_to_look_like_one(tmp_path):
    class Wide(nn.Module):
        def forward(self, x):
            return x.new_ones(7, 4) @ x

    torch.export.save(torch.export.export(Wide(), (torch.zeros(4, 3),)), tmp_path / "x.pt2")
    refusal, _ = load(str(tmp_path / "x.pt2")).try_on(torch.zeros(2, 3))
    assert refusal == "it returned (7, 3) for 2 inputs"


def rewritten(source: Path, target: Path, replaced: dict[str, bytes], renamed: dict[str, str] | None = None) -> Path:
    """A copy of an archive with other contents, or other names, of some members."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            key = next((k for k in replaced if name.endswith(k)), None)
            called = next((name.removesuffix(a) + b for a, b in (renamed or {}).items() if name.endswith(a)), name)
            new.writestr(called, old.read(name) if key is None else replaced[key])
    return target


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("called", ["model.pt", "model.PT", "Model.Pt"])  # torch finds members whatever their case
def test_a_pickle_hidden_in_an_export_is_not_opened(exported, tmp_path, called):
    buffer = io.BytesIO()
    torch.save(((Trap(tmp_path / "sprung"),), {}), buffer)
    member = "data/sample_inputs/model.pt"
    renamed = {member: f"data/sample_inputs/{called}"}
    bad = rewritten(exported / "fixed.pt2", tmp_path / "bad.pt2", {member: buffer.getvalue()}, renamed)
    with pytest.raises(ValueError, match="holds a pickled object"):
        exported_models.read(bad, CPU)
    assert not (tmp_path / "sprung").exists()


def test_the_guards_of_an_export_are_not_run_and_sizes_are_checked_all_the_same(exported, tmp_path):
    with zipfile.ZipFile(exported / "free.pt2") as old:
        name = next(n for n in old.namelist() if n.endswith("models/model.json"))
        program = json.loads(old.read(name))
    trap = f"__import__('builtins').open({str(tmp_path / 'sprung')!r}, 'w') is not None"
    program["guards_code"] = [*(program.get("guards_code") or []), trap]
    bad = rewritten(exported / "free.pt2", tmp_path / "bad.pt2", {"models/model.json": json.dumps(program).encode()})
    model = exported_models.read(bad, CPU).forward_func
    assert model(torch.zeros(3, 1, 12, 12)).shape == (3, 5)
    assert not (tmp_path / "sprung").exists()
    for shape in ((3, 1, 12, 13), (3, 12, 12)):
        with pytest.raises(RuntimeError):
            model(torch.zeros(shape))


def test_weights_marked_as_pickles_are_not_opened(exported, tmp_path):
    with zipfile.ZipFile(exported / "fixed.pt2") as old:
        name = next(n for n in old.namelist() if n.endswith("weights_config.json"))
        config = json.loads(old.read(name))
    next(iter(config["config"].values()))["use_pickle"] = True
    replaced = {"weights_config.json": json.dumps(config).encode()}
    bad = rewritten(exported / "fixed.pt2", tmp_path / "bad.pt2", replaced)
    with pytest.raises(ValueError, match="holds a pickled object"):
        exported_models.read(bad, CPU)


def test_other_files_are_no_exports(tmp_path):
    (tmp_path / "x.pt2").write_bytes(b"junk")
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "y.pt2")
    for name in ("x.pt2", "y.pt2"):
        with pytest.raises(ValueError, match="is not a model that torch.export.save has written"):
            exported_models.read(tmp_path / name, CPU)


def test_an_export_of_several_inputs_is_refused(tmp_path):
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    x = torch.zeros(2, 3)
    torch.export.save(torch.export.export(Two(), (x, x)), tmp_path / "x.pt2")
    with pytest.raises(ValueError, match="takes 2 inputs: expected one tensor"):
        exported_models.read(tmp_path / "x.pt2", CPU)


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".pth"])
def test_a_pickled_model_is_refused_unopened_with_the_safe_way(tmp_path, ending):
    path = tmp_path / f"model{ending}"
    torch.save({"net": Trap(tmp_path / "sprung")}, path)
    for read in (lambda: load(str(path)), lambda: state_dict_files.read(path)):
        with pytest.raises(ValueError, match=r"pickled model.*can run any code.*torch.export.save.*--weights"):
            read()
    torch.save(nn.Linear(2, 1), path)
    with pytest.raises(ValueError, match="pickled model"):
        load(str(path))
    assert not (tmp_path / "sprung").exists()


def test_a_refused_file_is_told_about_once(tmp_path, recwarn):
    (tmp_path / "evil.pth").write_bytes(b"cbuiltins\nprint\n(S'sprung'\ntR.")
    with pytest.raises(ValueError, match=r"evil.pth"):
        load(str(tmp_path / "evil.pth"))
    assert not recwarn.list


def test_weights_given_as_a_model_are_told_where_they_belong(tmp_path):
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="holds only weights. Pass them as --weights"):
        load(str(tmp_path / "w.pth"))


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "plain", "checkpoint", "parallel"])
def test_weights_fill_the_network(here, kind):
    torch.manual_seed(7)
    expected = model_factories.make("mine.py:table", 0)
    with torch.no_grad():
        for p in expected.parameters():
            p.normal_()
    state = expected.state_dict()
    path = here / ("w.safetensors" if kind == "safetensors" else "w.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "plain":
        torch.save(state, path)
    elif kind == "checkpoint":
        torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, path)
    else:
        torch.save({f"module.{k}": v for k, v in state.items()}, path)
    x = torch.randn(5, 4).double()
    assert torch.equal(load("mine.py:table", path).forward_func(x), expected(x))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"0.weight": torch.zeros(16, 4)}, "it lacks 0.bias, 2.bias"),
        ({"9.weight": torch.zeros(1)}, "has unknown 9.weight"),
        ([1, 2], "expected a state dict of tensors, got list"),
    ],
)
def test_weights_that_do_not_fit_are_refused(here, state, words):
    torch.save(state, here / "w.pth")
    with pytest.raises(ValueError, match=words):
        load("mine.py:table", here / "w.pth")


def test_weights_need_a_network(here):
    torch.save({}, here / "w.pth")
    with pytest.raises(ValueError, match="require a torch.nn.Module"):
        load("mine.py:product", here / "w.pth")


# --- factories --------------------------------------------------------------------------------------------------------


def test_modules_are_found_from_the_current_folder_and_the_path_is_given_back(here):
    import sys

    before, state = list(sys.path), torch.get_rng_state()
    (here / "package_of_mine").mkdir()
    (here / "package_of_mine" / "nets.py").write_text("from torch import nn\nclass A:\n    net = nn.Linear(4, 2)\n")
    for words in ("mine:table", "mine.py:table", "package_of_mine.nets:A.net"):
        assert isinstance(model_factories.make(words, 0), nn.Module)
    assert sys.path == before
    assert torch.equal(state, torch.get_rng_state())


def test_the_folder_of_a_file_comes_before_the_current_one(here):
    (here / "sub").mkdir()
    for folder, width in ((here, 1), (here / "sub", 2)):
        (folder / "helper_of_widths.py").write_text(f"WIDTH = {width}\n")
    text = "from torch import nn\nfrom helper_of_widths import WIDTH\ndef make():\n    return nn.Linear(4, WIDTH)\n"
    (here / "sub" / "net.py").write_text(text)
    assert model_factories.make("sub/net.py:make", 0).out_features == 2


def test_pages_name_a_model_without_its_folders(here, exported):
    assert load(f"{here / 'mine.py'}:table").title == "mine.py:table"
    assert load(str(exported / "free.pt2")).title == "free.pt2"
    assert load("torch.nn:ReLU").title == "torch.nn:ReLU"


def test_first_weights_come_from_the_seed(here):
    (here / "random_net.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(4, 2)\n")
    first, again, other = (model_factories.make("random_net.py:make", seed) for seed in (3, 3, 4))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


def test_a_network_from_a_factory_is_put_in_evaluation_mode_and_float32(here):
    (here / "half.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)).half()\n"
    )
    model = load("half.py:make")
    assert model.dtype == torch.float32
    assert model.forward_func(torch.ones(3, 4)).dtype == torch.float32
    assert not any(m.training for m in model.forward_func.model.modules())
    assert "half-precision" in model.notes[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nowhere.module:x", "no module 'nowhere.module'"),
        ("mine.py:x", "the module has no 'x'. It defines"),
        ("mine.py:a_number", "is a int: expected a network"),
        ("mine.py:Wide", "cannot be called without arguments .width, height."),
        ("mine.py:broken", "failed: RuntimeError: no luck"),
        ("nowhere.modles:x", "run in the folder that contains it .nowhere/modles.py."),
    ],
)
def test_wrong_models_are_refused(here, words, says):
    with pytest.raises(ValueError, match=says):
        load(words)


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "output"), [("Text", "logits"), ("Pair", "0"), ("Pair", "-2"), ("named", "logits")])
def test_one_tensor_of_an_output_can_be_chosen(here, words, output):
    x = torch.randn(3, 4).double()
    found = load(f"mine.py:{words}", output=output).forward_func(x)
    assert torch.equal(found, model_factories.make("mine.py:table", 0)(x))


@pytest.mark.parametrize(
    ("words", "output", "says"),
    [
        ("Pair", None, r"a tuple of 2: expected one tensor. Choose with --output 0 .or 1."),
        ("named", None, "a dictionary with logits, hidden: expected one tensor. Choose with --output logits"),
        ("Text", None, "a Logits: expected one tensor. Choose with --output logits"),
        ("Text", "loss", "--output loss: the model's output is a Logits"),
        ("Pair", "2", "--output 2: the model's output is a tuple of 2"),
    ],
)
def test_other_outputs_are_refused_with_the_way_out(here, words, output, says):
    with pytest.raises(OutputError, match=says):
        load(f"mine.py:{words}", output=output).forward_func(torch.zeros(2, 4).double())


def test_classes_instead_of_numbers_are_refused():
    with pytest.raises(OutputError, match="expected floating-point numbers such as logits"):
        OneTensor(lambda x: x.argmax(1), None)(torch.zeros(2, 3))


def layers(here, act):
    text = f"from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 3), nn.{act}())\n"
    (here / "layers.py").write_text(text)
    return load("layers.py:make").identity


def export(here, change):
    class Scaled(nn.Module):
        def __init__(self, act, constant):
            super().__init__()
            torch.manual_seed(0)
            self.net, self.act, self.constant = nn.Linear(4, 3), act, torch.tensor([constant, 1.0, 1.0])

        def forward(self, x):
            return self.act(self.net(x) * self.constant)

    with torch.random.fork_rng():
        torch.export.save(torch.export.export(Scaled(*change), (torch.zeros(2, 4),)), here / "net.pt2")
    return load(str(here / "net.pt2")).identity


def weights(here, factor):
    (here / "large.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(300, 600)\n")
    state = model_factories.make("large.py:make", 0).state_dict()
    state["weight"].view(-1)[1::2] *= factor
    torch.save(state, here / "w.pth")
    return load("large.py:make", here / "w.pth").identity


def helper(here, factor):
    import sys

    sys.modules.pop("helper_of_mine", None)  # as in another process
    sys.modules.pop("helpers.deep", None)
    (here / "helpers").mkdir(exist_ok=True)
    (here / "helpers" / "deep.py").write_text(f"def scaled(x):\n    return {factor} * x\n")
    (here / "helper_of_mine.py").write_text("from helpers.deep import scaled\n")
    (here / "net.py").write_text("from helper_of_mine import scaled\ndef f(x):\n    return scaled(x).sum(1)\n")
    return load("net.py:f").identity


@pytest.mark.parametrize(
    ("made", "one", "other"),
    [
        (layers, "ReLU", "Tanh"),
        (export, (nn.ReLU(), 1.0), (nn.Tanh(), 1.0)),
        (export, (nn.ReLU(), 1.0), (nn.ReLU(), 5.0)),
        (weights, 1.0, 3.0),
        (helper, 1.0, 2.0),
    ],
)
def test_another_model_has_another_identity(here, made, one, other):
    first = made(here, one)
    assert made(here, one) == first
    assert made(here, other) != first


def test_the_identity_of_a_model_follows_its_weights_and_its_code(here):
    first = load("mine.py:table").identity
    assert load("mine.py:table").identity == first
    state = model_factories.make("mine.py:table", 0).state_dict()
    state["0.weight"] = state["0.weight"] + 1
    torch.save(state, here / "w.pth")
    assert load("mine.py:table", here / "w.pth").identity != first
    one = load("mine.py:product").identity
    (here / "mine.py").write_text((here / "mine.py").read_text().replace("3 * x", "4 * x"))
    assert load("mine.py:product").identity != one
