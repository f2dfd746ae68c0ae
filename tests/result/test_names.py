"""Names of features and classes, and the unit of the output, are given once and kept by results."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from smoothhess import Interactions, SmoothHess, TokenSmoothHess, baselines, evaluate, segments, sweep
from smoothhess.result.pairs import COLUMNS, TopPairs

NAMES = ["age", "dose", "height", "weight"]
CLASSES = ["cat", "dog", "cow"]
OPTIONS = {"sigma": 0.5, "n_calls": 64}
X = torch.linspace(-1, 1, 12).reshape(3, 4).double()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def named(x=X, target=0, **options):
    given = {"names": NAMES, "classes": CLASSES, "unit": "€", **OPTIONS, **options}
    return SmoothHess(network()).attribute(x, target, **given)


def labels(result):
    return result.names, result.classes, result.unit


def test_names_are_kept_by_slices_files_devices_and_concatenation(tmp_path):
    result = named()
    assert labels(result) == ((tuple(NAMES),) * 3, tuple(CLASSES), "€")
    assert labels(result[1:]) == ((tuple(NAMES),) * 2, tuple(CLASSES), "€")
    result.save(tmp_path / "x.safetensors")
    for other in (
        Interactions.load(tmp_path / "x.safetensors"),
        Interactions.cat([result[0], result[1:]]),
        result.merge(named(seed=1)),
        result.to("cpu"),
        result.unshrunk(),
        SmoothHess(network()).more(result, 32),
    ):
        assert labels(other) == labels(result)
        assert set(other.top_pairs(1)[0][0].names) <= set(NAMES)


def test_unequal_names_cannot_be_combined():
    other = NAMES[::-1]
    with pytest.raises(ValueError, match="different names of features: 'age', .* and 'weight'"):
        Interactions.cat([named(), named(names=other)])
    with pytest.raises(ValueError, match="different names of features"):
        named().merge(named(names=other, seed=1))
    with pytest.raises(ValueError, match="different names of classes"):
        Interactions.cat([named(), named(classes=["a", "b", "c"])])
    with pytest.raises(ValueError, match="different units of the output: € and \\$"):
        named().merge(named(unit="$", seed=1))
    plain = named(names=None, classes=None, unit=None)
    assert labels(Interactions.cat([plain, named()])) == ((tuple(NAMES),) * 6, tuple(CLASSES), "€")
    assert labels(plain.merge(named(seed=1))) == labels(named())


def test_tokens_of_different_texts_are_concatenated():
    words, head = nn.Embedding(10, 4), nn.Linear(4, 2)
    explainer = TokenSmoothHess(lambda ids: head(words(ids).mean(1).tanh()), words)
    parts = [
        explainer.attribute(torch.tensor([ids]), 0, sigma=0.1, n_calls=16, names=names, classes=["no", "yes"])
        for ids, names in (([1, 2, 3], ["a", "b", "c"]), ([4, 5, 6], ["d", "e", "f"]))
    ]
    both = Interactions.cat(parts)
    assert both.names == (("a", "b", "c"), ("d", "e", "f"))
    assert both.classes == ("no", "yes")
    with pytest.raises(ValueError, match="different names: pass the index"):
        both.row("a")


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="names must be 4 strings, one per feature, got 2"):
        named(names=["a", "b"])
    with pytest.raises(TypeError, match="got one string"):
        named(names="abcd")
    with pytest.raises(TypeError, match="classes must be a sequence of strings"):
        named(classes="cat")


@pytest.mark.parametrize("classes", [CLASSES[:2], [*CLASSES, "horse"], []])
def test_there_is_one_name_for_each_output(classes):
    with pytest.raises(ValueError, match=f"one name for each of the 3 outputs of the model, .* got {len(classes)}"):
        named(classes=classes)
    net = network()
    single = SmoothHess(lambda x: net(x)[:, 0]).attribute(X, classes=["risk"], **OPTIONS)
    assert single.classes == ("risk",)


def test_groups_have_the_names_of_segments():
    parts = segments.columns(NAMES, {"body": ["height", "weight"]})
    streamed = SmoothHess(network()).attribute(X, 0, feature_mask=parts, **OPTIONS)
    exact = baselines.softplus(network(), X, 0, beta=4.0).groups(parts)
    for result in (named().groups(parts), streamed, exact):
        assert result.names == (("age", "dose", "body"),) * 3
    assert named().groups(parts.mask).names is None
    given = SmoothHess(network()).attribute(X, 0, feature_mask=parts.mask, names=["a", "b", "c"], **OPTIONS)
    assert given.names == (("a", "b", "c"),) * 3


def test_features_are_found_by_name():
    result = named()
    torch.testing.assert_close(result.row("dose").value, result.row(1).value)
    with pytest.raises(ValueError, match=r"'dosis'. Did you mean 'dose'\?"):
        result.row("dosis")
    with pytest.raises(ValueError, match="this result has no names"):
        named(names=None).row("dose")
    with pytest.raises(ValueError, match="2 features are named 'a'"):
        named(names=["a", "a", "b", "c"]).row("a")


def test_several_inputs_have_names_of_their_own():
    def model(a, b):
        return (a[:, 0] * b[:, 1]) + b.prod(1)

    a, b = torch.ones(1, 2), torch.ones(1, 2)
    of = SmoothHess(model)
    assert of.attribute((a, b), names=(["u", "v"], ["w", "x"]), **OPTIONS).names == (("u", "v", "w", "x"),)
    assert of.attribute({"a": a, "b": b}, names={"b": ["w", "x"]}, **OPTIONS).names == (("a[0]", "a[1]", "w", "x"),)
    assert of.attribute((a, b), names=["u", "v", "w", "x"], **OPTIONS).names == (("u", "v", "w", "x"),)
    with pytest.raises(ValueError, match="input 1 has 2 features, got 1 names"):
        of.attribute((a, b), names=(["u", "v"], ["w"]), **OPTIONS)


def test_columns_of_a_table_are_names():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=NAMES)
    result = SmoothHess(network()).attribute(table, 0, **OPTIONS)
    assert result.names == (tuple(NAMES),) * 3
    torch.testing.assert_close(result.hessian, named().hessian)
    for found in (
        baselines.gradient(network(), table, 0),
        baselines.random(network(), table, 0),
        baselines.softplus(network(), table, 0, beta=4.0),
        baselines.smoothgrad(network(), table, 0, **OPTIONS),
        baselines.integrated_hessians(network(), table, 0, of="softplus", beta=4.0, n_steps=2, tolerance=math.inf),
    ):
        assert found.names == result.names
    scales = sweep(network(), table, [0.1, 0.2], target=0, n_calls=64)
    assert all(r.names == result.names for r in scales.results)
    assert scales.difference(0, 1).names == result.names
    found = evaluate.global_interactions(SmoothHess(network()), table, target=0, **OPTIONS)
    assert found.names == tuple(NAMES)
    assert set(found.top_pairs(1)[0].names) <= set(NAMES)
    both = SmoothHess(lambda a, b: a.prod(1) + b.sum(1)).attribute((table, np.ones((3, 1))), **OPTIONS)
    assert both.names == ((*NAMES, "1[0]"),) * 3


def test_pairs_print_as_a_table():
    pairs = named().top_pairs(2)
    assert isinstance(pairs, TopPairs)
    assert len(pairs) == 3
    assert [len(p) for p in pairs] == [2, 2, 2]
    head, columns, *rows = repr(pairs).splitlines()
    start = "Strongest pairs of 3 example(s); ± half of a 95 % interval; relative error of the estimate "
    assert head.startswith(start)
    assert columns.split() == "example pair value effect (€) of separate of output size q interval".split()
    assert len(rows) == 6
    assert all(any(row.endswith(words) for words in ("zero", "exact", "unknown")) for row in rows)
    assert "90 %" in repr(named().top_pairs(2, level=0.9))


def test_the_interval_of_a_pair_is_described():
    result = SmoothHess(lambda x: x[:, 0].abs() * x[:, 1].sigmoid()).attribute(X[:1], names=NAMES, **OPTIONS)
    rows = dict(zip((p.names for p in result.top_pairs(6)[0]), repr(result.top_pairs(6)).splitlines()[2:], strict=True))
    for pair in result.top_pairs(6)[0]:
        contains = pair.low <= 0 <= pair.high
        words = "exactly zero" if pair.low == pair.high == 0 else "contains zero" if contains else "excludes zero"
        assert rows[pair.names].endswith(words)


def test_pairs_become_a_frame():
    pytest.importorskip("pandas")
    frame = named().top_pairs(2).to_frame()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["example"].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(frame["first"]) <= set(NAMES)


def test_the_target_is_printed_by_name():
    assert named().target_names == ("cat",) * 3
    assert named(target=[0, 1, 2]).target_names == tuple(CLASSES)
    assert named(target=[0, 1, 2], classes=None).target_names == ("0", "1", "2")
    assert "dog" in repr(named(target=1))


def test_a_page_shows_names_classes_and_unit(tmp_path):
    page = named().report(tmp_path / "x.html").read_text()
    assert all(name in page for name in NAMES)
    assert "\\u2018cat\\u2019 output in \\u20ac" in page
