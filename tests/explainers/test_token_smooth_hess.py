"""Interactions of tokens equal the exact matrix of the gated function, and wrong arguments are refused."""

import importlib
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import smoothhess as sh
from benchmarks.small_transformers import SHAPES, Shape, Transformer, VisionTransformer, gated, written_out
from smoothhess.explainers.token_smooth_hess import TokenSmoothHess
from smoothhess.result.files import restore

pytestmark = pytest.mark.rounding
SMALL = {"width": 32, "vocabulary": 20, "length": 10}


def transformer(name="GPT", seed=0, **changes):
    torch.manual_seed(seed)
    shape = Shape(**{**SHAPES[name].__dict__, **SMALL, **changes})
    return Transformer(shape).eval()


def text(length=7, batch=1, seed=1):
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


def exact(model, ids, target, baseline=None):
    """The token × token matrix by double backward, without fused attention, hooks and sampling."""
    F = gated(written_out(model), ids, target, None if baseline is None else baseline.double())
    return torch.func.hessian(F)(torch.ones(len(ids), dtype=torch.float64)).detach()


def distance(found, true):
    return float(((found.double() - true).norm() / true.norm()).detach())


@pytest.mark.parametrize("name", SHAPES)
def test_gates_equal_the_exact_matrix_at_one_block(name):
    torch.manual_seed(0)
    model, ids = Transformer(SHAPES[name]).eval(), torch.randint(0, 40, (1, 12))
    target = (2,) if model.shape.classes else (11, 7)
    result = TokenSmoothHess(model, "tokens").attribute(ids, target, sigma=0.01, n_calls=24)
    assert distance(result.hessian[0], exact(model, ids[0], target)) <= 1e-3
    assert float(result.relative_error) <= 1e-2
    assert torch.allclose(result.output, model(ids).detach()[(0, *target)], atol=1e-5)


@pytest.mark.parametrize("sigma", [0.1, 0.3])
@pytest.mark.parametrize("name", ["GPT", "BERT"])
def test_intervals_hold_the_gaussian_average_of_exact_matrices(name, sigma):
    model, ids, draws = transformer(name, width=16), text(6), 40
    target = (2,) if model.shape.classes else (5, 5)
    F = gated(written_out(model), ids[0], target)
    delta = sigma * torch.randn(draws, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    hessians = torch.func.vmap(torch.func.hessian(F))(1 + torch.cat([delta, -delta]))
    pairs = hessians.detach().unflatten(0, (2, draws)).mean(0)  # mirrored draws
    result = TokenSmoothHess(model, "tokens").attribute(ids, target, sigma=sigma, n_calls=768)
    error = (result.stderr()[0].double().square() + pairs.var(0) / draws).sqrt()
    z = (result.unshrunk().hessian[0] - pairs.mean(0)) / error
    assert float(z[torch.triu_indices(6, 6).unbind()].square().mean().sqrt()) < 1.6
    assert float(z.abs().max()) < 4.5


def test_a_rotation_of_the_embedding_space_changes_nothing():
    class Rotated(nn.Module):
        """The same function; its embeddings are rotated, and rotated back after the layer."""

        def __init__(self, model, rotation):
            super().__init__()
            self.words = nn.Embedding.from_pretrained(model.tokens.weight.detach() @ rotation)
            self.model, self.rotation = model, rotation

        def forward(self, ids):
            return sh.Embedded(self.model, "tokens")(self.words(ids) @ self.rotation.mT, ids)

    model, ids = transformer(), text()
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(5))).Q
    plain, turned = (
        TokenSmoothHess(m, layer).attribute(ids, (6, 5), sigma=0.1, n_calls=28).hessian
        for m, layer in ((model, "tokens"), (Rotated(model, rotation).eval(), "words"))
    )
    assert distance(turned, plain.double()) <= 1e-3


BASELINES = {
    "zero": lambda model, ids: torch.zeros(32),
    3: lambda model, ids: model.tokens.weight[3],
    (1, 2, 3, 4, 5, 6, 7): lambda model, ids: model.tokens.weight[1:8],
}


@pytest.mark.parametrize("baseline", BASELINES, ids=str)
def test_baselines(baseline):
    model, ids = transformer(), text()
    vectors = BASELINES[baseline](model, ids).detach()
    true = exact(model, ids[0], (6, 5), vectors)
    for given in (baseline if not isinstance(baseline, tuple) else torch.tensor(baseline), vectors):
        result = TokenSmoothHess(model, "tokens", given).attribute(ids, (6, 5), sigma=0.01, n_calls=14)
        assert distance(result.hessian[0], true) <= 5e-3


def test_wrong_baselines_are_refused():
    model, ids = transformer(), text()
    for baseline, words in (
        ("median", 'must be "mean", "zero"'),
        (99, "token ids of baseline must be 0 … 19"),
        (torch.zeros(5), "one vector"),
        (torch.full((32,), torch.nan), "baseline must be finite"),
        (ids, "the baseline equals the embeddings of all 7 token"),
        (None, "got NoneType"),
        (ids > 3, "got booleans.*frozen="),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            TokenSmoothHess(model, "tokens", baseline).attribute(ids, (6, 5), sigma=0.1)


def test_the_mean_of_embeddings_with_a_largest_norm_is_that_of_the_vectors_in_use():
    torch.manual_seed(0)
    words, head, ids = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 1), text(3)
    model = lambda i: head(words(i).prod(1)).tanh()
    mean = words.weight.detach().renorm(2, 0, 0.5).mean(0)
    found, true = (
        TokenSmoothHess(model, words, b).attribute(ids, sigma=0.3, n_calls=40).hessian for b in ("mean", mean)
    )
    torch.testing.assert_close(found, true)


def test_padding_is_frozen_and_the_rest_is_that_of_the_text_without_padding():
    model, ids = transformer("BERT"), text(6)
    padded, mask = functional.pad(ids, (0, 3)), torch.tensor([[1] * 6 + [0] * 3])
    explainer = TokenSmoothHess(model, model.tokens)
    result = explainer.attribute(padded, 1, {"attention_mask": mask}, sigma=0.01, n_calls=12, frozen=mask == 0)
    assert distance(result.hessian[0, :6, :6], exact(model, ids[0], (1,))) <= 2e-3
    for numbers in (result.hessian[0, 6:], result.stderr()[0, 6:], result.gradient[0, 6:]):
        assert not numbers.any()
    assert max(p.j for p in result.top_pairs(100)[0]) == 5
    by_id = explainer.attribute(padded, 1, mask, sigma=0.01, n_calls=12, frozen=[0])
    assert torch.equal(by_id.hessian, result.hessian)
    with pytest.raises(ValueError, match="all 9 tokens are frozen"):
        explainer.attribute(padded, 1, mask, sigma=0.01, frozen=torch.ones(9, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot be combined with gaussian"):
        explainer.attribute(padded, 1, mask, gaussian=sh.Isotropic(0.1), frozen=[0])


def test_texts_of_different_length_in_one_batch():
    model = transformer("BERT")
    ids, mask = functional.pad(text(6, 2), (0, 2)), torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:], mask[1, 4:] = 0, 0
    result = TokenSmoothHess(model, "tokens").attribute(ids, [1, 2], mask, sigma=0.01, n_calls=24, frozen=mask == 0)
    for b, length in enumerate((6, 4)):
        true = exact(model, ids[b, :length], (b + 1,))
        assert distance(result.hessian[b, :length, :length], true) <= 5e-3
        assert not result[b].gradient[0, length:].any()
        assert float(result.hessian[b, length:].abs().max()) <= 5e-3 * float(true.norm())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": torch.tensor([[1, 20]])}, "input_ids must be 0 … 19, the rows of the embedding, got 1 … 20"),
        ({"input_ids": torch.tensor([1, 2])}, "integers \\(B, T\\)"),
        ({"input_ids": torch.ones(1, 3)}, "integers \\(B, T\\)"),
        ({"input_ids": [[1, 2, 3], [1, 2]]}, "texts of the same length. Pad"),
        ({"input_ids": [torch.tensor([1, 2, 3]), torch.tensor([1, 2])]}, "texts of the same length. Pad"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "got an empty text of shape \\(1, 0\\)"),
        (
            {"target": (7, 1)},
            r"target \(7, 1\) is out of range .* Expected \(0 … 6, 0 … 19\), such as \(position, token",
        ),
        ({"target": "predicted"}, r"such as \(-1, token\)"),
        ({"target": (1, 20)}, "out of range"),
        ({"target": sh.continuation([1] * 8)}, "reads positions -2 … 5 of 7"),
        ({"target": sh.continuation([20])}, "not in the vocabulary of 20"),
        ({"space": "words"}, 'space must be "gates" or "embedding"'),
        ({"frozen": torch.zeros(3, dtype=torch.bool)}, "frozen must be a boolean mask"),
        ({"names": ["a", "b"]}, "names must be 7 strings"),
        ({"frozen": [[True] * 7]}, "all 7 tokens are frozen in text 0"),
        ({"additional_forward_args": {"attention_mask": torch.ones(1, 5)}}, r"shape \(1, 5\).*one entry per token"),
        ({"additional_forward_args": {"past_key_values": ()}}, "cache of keys and values was passed"),
        ({"sigma": None}, "exactly one of sigma"),
        ({"compile": True}, "compile=True is not supported"),
    ],
)
def test_wrong_arguments_are_refused(changes, words):
    given = {"input_ids": text(), "target": (6, 5), "sigma": 0.1, "n_calls": 14, **changes}
    model = transformer()
    with pytest.raises(ValueError, match=words):
        TokenSmoothHess(model, "tokens").attribute(given.pop("input_ids"), given.pop("target"), **given)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": None}, "got NoneType"),
        ({"input_ids": (text(),)}, "got tuple"),
        ({"frozen": "pad"}, "got str. For special tokens"),
        ({"feature_mask": [None, *range(5), None]}, r"one integer per token.*word_ids\(\)"),
        ({"names": list(range(7))}, "names must be 7 strings, or 1 lists of them, got int"),
    ],
)
def test_arguments_of_wrong_types_are_refused(changes, words):
    given = {"input_ids": text(), "sigma": 0.1, "n_calls": 14, **changes}
    with pytest.raises(TypeError, match=words):
        TokenSmoothHess(transformer(), "tokens").attribute(given.pop("input_ids"), (6, 5), **given)


def test_texts_as_lists_and_as_small_integers():
    explainer, ids = TokenSmoothHess(transformer(), "tokens"), text(4, 2)
    true = explainer.attribute(ids, (3, 1), sigma=0.1, n_calls=16)
    for given in (list(ids), ids.to(torch.uint8), ids.numpy().astype("int16")):
        assert torch.equal(explainer.attribute(given, (3, 1), sigma=0.1, n_calls=16).hessian, true.hessian)


def test_a_target_in_the_padding_is_refused():
    model, ids, mask = transformer(), text(), torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    for target in ((-1, 5), sh.contrast((4, 1), (6, 1)), sh.continuation([3])):
        with pytest.raises(ValueError, match="target position of a text is padding"):
            TokenSmoothHess(model, "tokens").attribute(ids, target, {"attention_mask": mask}, sigma=0.1)


def test_a_mask_of_integers_is_not_taken_for_token_ids():
    model, ids = transformer("BERT"), text(6, 2)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1]])
    explainer, options = TokenSmoothHess(model, "tokens"), {"sigma": 0.1, "n_calls": 12}
    for wrong in (mask, mask[0], mask.numpy(), torch.ones(6, dtype=torch.long)):
        with pytest.raises(TypeError, match=r"zeros and ones as torch.int64.*mask.bool\(\)"):
            explainer.attribute(ids, 1, frozen=wrong, **options)
    right = explainer.attribute(ids, 1, frozen=mask.bool().numpy(), **options)
    assert not right.hessian[:, 5].any()
    assert explainer.attribute(ids[:, :2], 1, frozen=[0, 1], **options).shape == (2, 2, 2)


def test_encodings_of_tokenizers():
    """A dictionary of all arguments is refused, one of the others may hold arrays."""
    model, ids = transformer("BERT"), text(5, 2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    explainer, options = TokenSmoothHess(model, "tokens"), {"sigma": 0.1, "n_calls": 10}
    encoding = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    with pytest.raises(TypeError, match=r"got dict.*input_ids=encoding\['input_ids'\]"):
        explainer.attribute(encoding, 1, **options)
    with pytest.raises(ValueError, match="additional_forward_args contain 'input_ids'"):
        explainer.attribute(ids, 1, encoding, **options)
    arrays = explainer.attribute(encoding.pop("input_ids"), 1, encoding, **options)
    assert torch.equal(arrays.hessian, explainer.attribute(ids, 1, mask, **options).hessian)


def test_padding_without_a_mask_is_refused():
    model, ids = transformer("BERT"), functional.pad(text(), (0, 1))
    model.tokens.padding_idx = 0
    for args in (None, {"scale": 1.0}):
        with pytest.raises(ValueError, match=r"padding \(id 0\).*frozen=\[0\]"):
            TokenSmoothHess(model, "tokens").attribute(ids, 1, args, sigma=0.1)
    TokenSmoothHess(model, "tokens").attribute(ids, 1, sigma=0.1, n_calls=14, frozen=[0])


def test_wrong_layers_are_refused():
    model, ids = transformer(), text()
    with pytest.raises(ValueError, match="no layer is called 'wte'"):
        TokenSmoothHess(model, "wte")
    with pytest.raises(ValueError, match="ran 0 times"):
        TokenSmoothHess(model, nn.Embedding(20, 3)).attribute(ids, (6, 5), sigma=0.1)
    tied = nn.Embedding.from_pretrained(model.tokens.weight)
    tied.weight = model.tokens.weight
    with pytest.raises(ValueError, match="ran 0 times.*shares its weights with tokens: pass the one"):
        TokenSmoothHess(model, tied).attribute(ids, (6, 5), sigma=0.1)
    with pytest.raises(ValueError, match="ran 2 times.*decoder_inputs_embeds"):
        TokenSmoothHess(lambda i: model(i) + model(i), model.tokens).attribute(ids, (6, 5), sigma=0.1)
    with pytest.raises(ValueError, match="one vector per token"):
        TokenSmoothHess(lambda i: model(i.T).transpose(0, 1), model.tokens).attribute(ids, (6, 5), sigma=0.1)
    with pytest.raises(TypeError, match=r"bfloat16.*model.float\(\)"):
        TokenSmoothHess(transformer().bfloat16(), "tokens").attribute(ids, (6, 5), sigma=0.1)


def test_training_mode_is_refused_before_random_numbers_are_drawn():
    model, ids = nn.Sequential(nn.Embedding(20, 4), nn.Dropout(), nn.Flatten(), nn.Linear(28, 2)), text()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="training mode"):
        TokenSmoothHess(model, "0").attribute(ids, 1, sigma=0.1)
    model.eval()
    noisy = lambda i: model(i) + torch.randn(len(i), 2)
    with pytest.raises(ValueError, match="draws random numbers"):
        TokenSmoothHess(noisy, model[0]).attribute(ids, 1, sigma=0.1)
    assert torch.equal(state, torch.get_rng_state())


def test_the_paper_s_noise_in_the_embedding_space_is_read_along_the_same_direction():
    model, ids = transformer("BERT"), text(4, 2)
    options = {"sigma": 0.002, "n_calls": 2 * 4 * 32, "shrink": False}
    result = TokenSmoothHess(model.double(), "tokens").attribute(ids, 1, space="embedding", names=["t"] * 4, **options)
    assert result.hessian.shape == (2, 4, 4)
    for b in range(2):
        assert distance(result.hessian[b], exact(model, ids[b], (1,))) <= 2e-2
    frozen = TokenSmoothHess(model, "tokens", 3).attribute(
        ids, 1, space="embedding", frozen=[True, *[False] * 3], **options
    )
    assert not frozen.hessian[:, 0].any()


def test_a_mask_that_sums_coordinates_of_embeddings_warns():
    model, ids = transformer("BERT"), text(3)
    inside, later = sh.Embedded(model, "tokens"), sh.Embedded(model, "blocks.0")
    function = lambda v, i: inside(v, i)  # its vectors are rows of the embedding
    by_token, options = torch.arange(3)[:, None].expand(3, 32), {"sigma": 0.1, "n_calls": 20, "control": None}
    for f, vectors in ((inside, inside.embed(ids)), (later, later.embed(ids)), (function, inside.embed(ids))):
        with pytest.warns(UserWarning, match="sums the coordinates of embeddings.*TokenSmoothHess.*direction="):
            sh.SmoothHess(f).attribute(vectors, 1, ids, feature_mask=by_token, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="feature_mask sums")
        vectors = inside.embed(ids)
        sh.SmoothHess(inside).attribute(vectors, 1, ids, feature_mask=by_token, direction=vectors, **options)
        sh.SmoothHess(inside).attribute(vectors, 1, ids, feature_mask=torch.arange(32).expand(3, 32), **options)
        sh.SmoothHess(lambda x: x.prod(2).sum(1)).attribute(vectors, feature_mask=by_token, **options)


def test_groups_of_tokens_sum_the_gates():
    model, ids = transformer().double(), text(6, 2)
    explainer, words = TokenSmoothHess(model, "tokens"), torch.tensor([0, 0, 1, 1, 1, 2])
    options = {"sigma": 0.1, "n_calls": 48, "shrink": False}
    single, groups = (explainer.attribute(ids, (5, 2), feature_mask=m, **options) for m in (None, words))
    sums = functional.one_hot(words).double()
    torch.testing.assert_close(groups.hessian, sums.T @ single.hessian @ sums)
    named = explainer.attribute(ids, (5, 2), feature_mask=words, names=["not", "very", "good"], **options)
    assert {n for p in named.top_pairs(3)[0] for n in p.names} == {"not", "very", "good"}


def test_names_follow_their_texts(tmp_path):
    model, ids = transformer(), text(3, 2)
    names = [["a", "b", "c"], ["d", "e", "f"]]
    result = TokenSmoothHess(model, "tokens").attribute(ids, (2, 1), sigma=0.1, n_calls=12, names=names)
    result.save(tmp_path / "r.safetensors")
    loaded = sh.Interactions.load(tmp_path / "r.safetensors")
    for again in (result, loaded, sh.Interactions.cat([result[0], result[1]])):
        assert [{n for p in pairs for n in p.names} for pairs in again.top_pairs(3)] == [{*"abc"}, {*"def"}]
        assert again.feature_kind == "token"
    older = result.parts()
    del older.about["feature_kind"]
    assert restore(older).feature_kind == ""
    assert sh.Interactions.cat([result[0], restore(older)[1]]).feature_kind == ""
    assert result[1].names == (("d", "e", "f"),)
    assert result.top_pairs(1, ["x", "y", "z"])[0][0].names[0] in "xyz"
    assert result.groups(torch.tensor([0, 0, 1])).names is None
    with pytest.raises(TypeError, match="one string"):
        TokenSmoothHess(model, "tokens").attribute(ids, (2, 1), sigma=0.1, n_calls=12, names="abc")


def test_more_continues_a_run():
    model, ids, mask = transformer().double(), text(5, 2), torch.ones(2, 5, dtype=torch.long)
    explainer, options = TokenSmoothHess(model, "tokens"), {"sigma": 0.2, "control": None}
    target = sh.contrast([(4, 1), (3, 1)], (4, 2))
    one = explainer.attribute(ids, target, {"attention_mask": mask}, n_calls=60, **options)
    two = explainer.attribute(ids, target, {"attention_mask": mask}, n_calls=20, **options)
    two = explainer.more(two, 40, ids, {"attention_mask": mask})
    torch.testing.assert_close(two.hessian, one.hessian)
    assert float(one.n_passes[0]) == 63.5  # with one at the inputs, to record activations
    with pytest.raises(ValueError, match="f\\(x\\) of example 0"):
        explainer.more(two, 40, ids.flip(1), mask)
    for other, changes in ((TokenSmoothHess(model, "tokens", "zero"), {}), (explainer, {"frozen": ids % 2 == 1})):
        with pytest.raises(ValueError, match="the gradient at example .* the same baseline and frozen tokens"):
            other.more(two, 40, ids, {"attention_mask": mask}, **changes)


def test_a_data_set_of_texts(tmp_path):
    model, ids = transformer("BERT"), text(5, 4)
    explainer, options = TokenSmoothHess(model, "tokens"), {"sigma": 0.1, "n_calls": 20}
    explain = lambda i, target, seeds: explainer.attribute(i, target, seed=seeds, **options)
    store = sh.explain_dataset(explain, ids, tmp_path / "store", target=1)
    assert len(store) == 4
    assert store[2].hessian.shape == (5, 5)
    with pytest.raises(TypeError, match="for token ids use TokenSmoothHess"):
        sh.explain_dataset(sh.SmoothHess(model), ids, tmp_path / "other", target=1, sigma=0.1)


def test_threads_and_other_calls_of_the_model():
    model, ids = transformer("BERT"), text(5, 3)
    explainer = TokenSmoothHess(model, "tokens")
    alone = [explainer.attribute(ids, c, sigma=0.1, n_calls=40).hessian for c in range(3)]
    plain, stop, wrong = model(ids), threading.Event(), []

    def call():
        with torch.no_grad():
            while not stop.is_set():
                wrong.extend([] if torch.allclose(model(ids), plain, atol=1e-5) else [1])

    caller = threading.Thread(target=call)
    caller.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda c: explainer.attribute(ids, c, sigma=0.1, n_calls=40).hessian, range(3)))
    finally:
        stop.set()
        caller.join()
    assert not wrong
    for a, b in zip(alone, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))
    assert not any(m._forward_hooks for m in model.modules())


# --- targets and outputs ------------------------------------------------------------------------------------------


def test_the_log_probability_of_a_continuation():
    model, ids = transformer().double(), text(7, 2)
    manual = lambda i: model(i).log_softmax(-1)[:, 4:6].gather(2, i[:, 5:7, None]).sum((1, 2))
    options = {"sigma": 0.1, "n_calls": 28, "frozen": [False] * 5 + [True] * 2}
    found = TokenSmoothHess(model, "tokens").attribute(ids, sh.continuation(ids[:, 5:]), **options)
    true = TokenSmoothHess(manual, model.tokens).attribute(ids, None, **options)
    torch.testing.assert_close(found.hessian, true.hessian)
    started = TokenSmoothHess(model, "tokens").attribute(ids, sh.continuation(ids[:, 5:], [5, 5]), **options)
    torch.testing.assert_close(started.output, true.output)
    following = TokenSmoothHess(model, "tokens").attribute(ids, sh.continuation([3], 7), **options)
    torch.testing.assert_close(following.output, model(ids)[:, -1].log_softmax(-1)[:, 3])
    with pytest.raises(ValueError, match="input_ids must contain the continuation"):
        TokenSmoothHess(model, "tokens").attribute(ids, sh.continuation([0, 0]), **options)


def test_a_contrast_is_the_difference_of_two_results():
    model, ids = transformer().double(), text(5)
    a, b, both = (
        TokenSmoothHess(model, "tokens").attribute(ids, t, sigma=0.1, n_calls=20, shrink=False)
        for t in ((4, 1), (4, 2), sh.contrast((4, 1), (4, 2)))
    )
    torch.testing.assert_close(both.hessian, a.hessian - b.hessian)
    torch.testing.assert_close(both.output, a.output - b.output)


@dataclass
class Output:
    """An output with fields, without positions."""

    logits: Tensor
    past_key_values: object = None


def test_fields_of_outputs():
    model, ids = transformer(), text(4)
    plain = TokenSmoothHess(model, "tokens").attribute(ids, (3, 1), sigma=0.1, n_calls=16)
    functions = {
        "logits": lambda i: Output(model(i)),
        0: lambda i: Output(model(i)),
        "scores": lambda i: {"scores": model(i)},
        1: lambda i: (None, model(i)),
    }
    for field, function in functions.items():
        found = TokenSmoothHess(function, model.tokens, output=field).attribute(ids, (3, 1), sigma=0.1, n_calls=16)
        assert torch.equal(found.hessian, plain.hessian)
    with pytest.raises(
        TypeError, match="output 'past_key_values' of the model must be a tensor, got NoneType.*with logits"
    ):
        TokenSmoothHess(functions["logits"], model.tokens, output="past_key_values").attribute(ids, (3, 1), sigma=0.1)
    with pytest.raises(ValueError, match="the model returned Tensor, which has no output 0"):
        TokenSmoothHess(model, "tokens", output=0).attribute(ids, (3, 1), sigma=0.1)
    cached = TokenSmoothHess(lambda i: Output(model(i), "a cache"), model.tokens, output="logits")
    with pytest.warns(UserWarning, match="returns a cache of keys and values"):
        cached.attribute(ids, (3, 1), sigma=0.1, n_calls=16)


# --- kernels, compilers, other shapes -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler
def test_a_compiled_model_is_explained_without_its_compiler_and_compiled_blocks_with_it():
    model, ids = transformer(), text(4)
    compiled = torch.compile(model, backend="eager")
    for layer in ("tokens", model.tokens):
        found = TokenSmoothHess(compiled, layer).attribute(ids, (3, 1), sigma=0.1, n_calls=16)
        plain = TokenSmoothHess(model, "tokens").attribute(ids, (3, 1), sigma=0.1, n_calls=16)
        assert torch.equal(found.hessian, plain.hessian)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    blocks = TokenSmoothHess(model, "tokens").attribute(ids, (3, 1), sigma=0.1, n_calls=16)
    assert torch.allclose(blocks.hessian, plain.hessian, atol=1e-4 * float(plain.hessian.norm()))
    function = TokenSmoothHess(torch.compile(lambda i: model(i), backend="eager"), model.tokens)
    assert torch.equal(function.attribute(ids, (3, 1), sigma=0.1, n_calls=16).hessian, blocks.hessian)
    for compiled in (nn.Sequential(torch.compile(transformer(), backend="eager")), transformer()):
        compiled.compile(backend="eager")
        with pytest.raises(ValueError, match="compile only modules after the layer"):
            TokenSmoothHess(compiled, next(m for m in compiled.modules() if isinstance(m, nn.Embedding)))


class Encoder(nn.Module):
    """A classifier around torch's own encoder, which has a fast path without gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 2)

    def forward(self, ids, padding=None):
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=padding).mean(1))


@pytest.mark.parametrize("trainable", [True, False])
def test_the_fast_path_of_torch_s_encoder(trainable):
    torch.manual_seed(0)
    model, ids = Encoder().eval().requires_grad_(trainable), text(5)
    result = TokenSmoothHess(model, "words").attribute(ids, 1, sigma=0.05, n_calls=200)
    inside = sh.Embedded(model, "words")
    e, b = inside.embed(ids), model.words.weight.detach().mean(0)
    direct = sh.SmoothHess(lambda s: inside(b + s[..., None] * (e - b), ids.expand(len(s), -1)))
    true = direct.attribute(torch.ones(1, 5), 1, sigma=0.05, n_calls=200)
    assert torch.allclose(result.hessian, true.hessian, atol=1e-3 * float(true.hessian.norm()))
    later = TokenSmoothHess(model, "encoder.layers.0.norm1").attribute(ids, 1, sigma=0.05, n_calls=20)
    assert bool(later.gradient.all())  # the hook prevents the fast path


def test_activations_before_the_layer_are_constants():
    torch.manual_seed(0)
    model, ids = Encoder().eval(), text(5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="recording or freezing")
        found = TokenSmoothHess(model, "encoder.layers.0").attribute(ids, 1, sigma=0.05, n_calls=200)
    assert bool(found.hessian.any())


def test_patches_of_a_vision_transformer():
    torch.manual_seed(0)
    model = VisionTransformer(Shape(causal=False, width=32)).eval()
    image = torch.rand(2, 1, 8, 8)
    result = TokenSmoothHess(model, "patches").attribute(image, [0, 1], sigma=0.01, n_calls=32)
    assert result.hessian.shape == (2, 16, 16)
    slow = written_out(model)
    e = slow.patches(image.double()).detach()

    def forward(s, b):
        replaced = e[b].mean(0) + s[:, None] * (e[b] - e[b].mean(0))
        x = torch.cat([slow.first[0], replaced])[None] + slow.positions
        for block in slow.blocks:
            x = block(x, None)
        return slow.head(x[:, 0])[0, b]

    for b in range(2):
        true = torch.func.hessian(lambda s, b=b: forward(s, b))(torch.ones(16).double())
        assert distance(result.hessian[b], true) <= 3e-3
    with pytest.raises(ValueError, match="one vector per token"):
        TokenSmoothHess(model, "patches.0").attribute(image, 0, sigma=0.01)
    with pytest.raises(ValueError, match="needs an nn.Embedding"):
        TokenSmoothHess(model, "patches", 3).attribute(image, 0, sigma=0.01)


# --- strength between the baseline and the text -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPT", "BERT"])
def test_intervals_of_the_strength_hold_the_mean_of_exact_matrices(name):
    model, ids = transformer(name, width=16), text(5)
    target = (2,) if model.shape.classes else (4, 5)
    F = gated(written_out(model), ids[0], target)
    centres = torch.rand(500, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    true = torch.func.vmap(torch.func.hessian(F), chunk_size=50)(centres).detach().abs()
    explainer = TokenSmoothHess(model, "tokens")
    found = [explainer.strength(ids, target, sigma=0.02, n_centers=16, seed=s) for s in range(4)]
    z = torch.stack([
        (f.value[0] - true.mean(0)) / (f.stderr[0].square() + true.var(0) / len(true)).sqrt() for f in found
    ])  # fmt: skip
    z = z[:, *torch.triu_indices(5, 5).unbind()]
    assert 0.4 < float(z.square().mean().sqrt()) < 1.7
    low, high = found[0].interval(0.95)
    assert bool((low <= found[0].value).all() and (found[0].value <= high).all())


def test_the_strength_of_frozen_tokens_is_zero_and_they_keep_their_embeddings():
    model, ids = transformer("BERT"), text(6, 2)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[:, 5] = 0
    explainer = TokenSmoothHess(model, "tokens")
    options = {"n_centers": 3, "control": None}
    found = explainer.strength(ids, [1, 2], {"attention_mask": mask}, frozen=mask == 0, **options)
    assert found.value.shape == (2, 6, 6)
    assert not found.value[:, 5].any()
    assert bool((found.value[:, :5, :5] > 0).all())
    first = explainer.strength(ids, [1, 2], {"attention_mask": mask}, frozen=[False] * 5 + [True], **options)
    assert torch.allclose(found.value, first.value)
    other = explainer.strength(ids, [1, 2], {"attention_mask": mask}, frozen=mask == 0, seed=1, **options)
    assert not torch.equal(found.value, other.value)
    with pytest.raises(ValueError, match="all 6 tokens are frozen"):
        explainer.strength(ids, 1, frozen=[True] * 6)
    with pytest.raises(ValueError, match="n_centers must be at least 2"):
        explainer.strength(ids, 1, n_centers=1)


def test_the_strength_has_the_names_of_the_tokens():
    explainer, ids = TokenSmoothHess(transformer("BERT"), "tokens"), text(4, 2)
    options = {"n_centers": 4, "control": None}
    names = [["not", "so", "very", "good"], ["a", "b", "c", "d"]]
    found = explainer.strength(ids, [1, 2], names=names, **options)
    low, high = found.interval(0.9)
    for example, own in enumerate(names):
        pairs = found.top_pairs(level=0.9)[example]
        assert len(pairs) == 6
        upper = found.value[example].triu(1)
        assert (pairs[0].i, pairs[0].j) == divmod(int(upper.argmax()), 4)
        for pair in pairs:
            assert pair.names == (own[pair.i], own[pair.j])
            at = example, pair.i, pair.j
            expected = [float(part[at]) for part in (found.value, found.stderr, low, high)]
            assert list(pair[3:]) == pytest.approx(expected)
        assert [pair.value for pair in pairs] == sorted((pair.value for pair in pairs), reverse=True)
    unnamed = explainer.strength(ids, [1, 2], **options)
    assert torch.equal(unnamed.value, found.value)
    assert unnamed.top_pairs(1)[0][0].names == tuple(map(str, found.top_pairs(1)[0][0][:2]))
    with pytest.raises(ValueError, match="names must be 4 strings"):
        explainer.strength(ids, [1, 2], names=["not", "good"], **options)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        found.top_pairs(0)


class InterruptedText(nn.Module):
    """A classifier of texts whose n-th call raises KeyboardInterrupt."""

    def __init__(self, at=None):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out, self.at, self.calls = nn.Embedding(20, 8), nn.Linear(8, 2), at, 0

    def forward(self, ids):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.out(self.words(ids).mean(1).tanh())


@pytest.mark.parametrize("space", ["gates", "embedding"])
def test_an_interrupted_result_has_names_and_feature_kind(space):
    ids, options = text(6, batch=2), {"sigma": 0.1, "n_calls": 1200, "space": space, "tails": None, "control": None}
    names = [list("abcdef"), list("ghijkl")]
    whole = TokenSmoothHess(InterruptedText(), "words").attribute(ids, 1, names=names, **options)
    with pytest.raises(sh.Interrupted, match="holds what was drawn") as caught:
        TokenSmoothHess(InterruptedText(40), "words").attribute(ids, 1, names=names, internal_batch_size=48, **options)
    result = caught.value.result
    assert result.status == ("interrupted",) * 2
    assert (result.names, result.feature_kind, result.shape) == (whole.names, "token", whole.shape)
    assert result.n_passes.tolist() < whole.n_passes.tolist()
    if space == "gates":
        grown = TokenSmoothHess(InterruptedText(), "words").more(result, 96, ids)
        assert (grown.names, grown.feature_kind) == (whole.names, "token")


def test_an_interruption_before_the_first_draw_and_of_strength():
    with pytest.raises(sh.Interrupted, match="no result") as caught:
        TokenSmoothHess(InterruptedText(2), "words").attribute(text(), 1, sigma=0.1, names=list("abcdefg"))
    assert caught.value.result is None
    with pytest.raises(sh.Interrupted, match="of 4 centres") as caught:
        TokenSmoothHess(InterruptedText(9), "words").strength(text(), 1, n_centers=4)
    assert caught.value.result is None


def test_the_benchmark_of_large_shapes_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    tokens = importlib.import_module("tokens")
    lines = tokens.large([row.tiny for row in tokens.LARGE if row.tokens != 128]).splitlines()
    assert [line.count("|") for line in lines[2:]] == [9] * 7  # head, rule and five rows


def test_diagnose_recommends_gates_between_baseline_and_text():
    model, ids = transformer("BERT"), text(6, batch=2)
    explainer = TokenSmoothHess(model, "tokens")
    found = explainer.diagnose(ids, 2)
    assert found.shape == (2, 6)
    assert 0.01 < found.recommended < 0.71
    assert explainer.diagnose(ids, 2, sigma=found.recommended).inside.all()
    frozen = explainer.diagnose(ids, 2, frozen=torch.tensor([1, 1, 1, 1, 1, 0]).bool(), sigma=0.1)
    free = explainer.diagnose(ids, 2, sigma=0.1)
    assert (frozen.odd[:, 6] < free.odd[:, 6]).all()  # one gate moves instead of six


def test_sweep_over_sigmas_of_gates():
    model, ids = transformer("GPT", width=16), text(5)
    explainer = TokenSmoothHess(model, "tokens")
    scales = sh.sweep(explainer, ids, [0.05, 0.1], target=(4, 3), n_calls=40, names=list("abcde"))
    single = explainer.attribute(ids, (4, 3), sigma=0.1, n_calls=40, tails=None, names=list("abcde"))
    torch.testing.assert_close(scales[1].hessian, single.hessian)
    assert scales[0].names[0] == tuple("abcde")
    change = scales.difference(1, 0)
    torch.testing.assert_close(change.hessian, scales[1].unshrunk().hessian - scales[0].unshrunk().hessian)
    with pytest.raises(ValueError, match="one of them twice"):
        sh.sweep(explainer, ids, [0.1, 0.1], target=(4, 3), n_calls=40)
    with pytest.raises(TypeError, match="pass a list"):
        sh.sweep(explainer, ids, 0.1, target=(4, 3))
