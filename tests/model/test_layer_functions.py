"""A model as a function of what one of its layers gives."""

import pytest
import torch
from torch import nn

import smoothhess as sh
from smoothhess.model.layer_functions import Embedded

pytestmark = pytest.mark.rounding


class Text(nn.Module):
    """Token ids and a mask → logits, as text models take them."""

    def __init__(self, tokens=30, width=6):
        super().__init__()
        self.words = nn.Embedding(tokens, width)
        self.mix = nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.out = nn.Linear(12, 2)

    def forward(self, ids, mask=None):
        return self.tail(self.words(ids), mask)

    def tail(self, vectors, mask=None):
        mask = torch.ones(vectors.shape[:2]).to(vectors) if mask is None else mask.to(vectors)
        pooled = (self.mix(vectors) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.out(pooled)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Text().double()


IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_embeddings_and_outputs_are_the_models_own(model):
    inside = Embedded(model, "words")
    vectors = inside.embed(IDS)
    assert torch.equal(vectors, model.words(IDS))
    assert not vectors.requires_grad
    assert torch.equal(inside(vectors, IDS, MASK), model(IDS, MASK))


def test_interactions_are_those_of_the_part_behind_the_layer(model):
    inside = Embedded(model, model.words)
    vectors = inside.embed(IDS)
    groups = {"feature_mask": torch.arange(5)[:, None], "direction": vectors - model.words.weight.detach().mean(0)}
    options = {"target": [0, 1], "radius": 1.0, "n_calls": 300, **groups}
    found = sh.SmoothHess(inside).attribute(vectors, additional_forward_args=(IDS, MASK), **options)
    tail = sh.SmoothHess(model.tail).attribute(vectors, additional_forward_args=MASK, **options)
    torch.testing.assert_close(found.hessian, tail.hessian)
    torch.testing.assert_close(found.gradient, tail.gradient)
    assert found.gradient[1, 3:].abs().max() < 1e-15  # tokens that are masked act on nothing
    assert bool((found.unshrunk().hessian[1, 3:].abs() <= 5 * found.stderr()[1, 3:]).all())


def test_any_layer_can_be_taken(model):
    inside = Embedded(model, "mix.1")
    hidden = inside.embed(IDS)
    assert hidden.shape == (2, 5, 12)
    assert torch.equal(inside(hidden, IDS), model(IDS))
    moved = inside(hidden + 1, IDS)
    assert not torch.equal(moved, model(IDS))


def test_the_model_is_given_back_as_it_was(model):
    inside = Embedded(model, "words")
    inside(inside.embed(IDS), IDS)
    with pytest.raises(ValueError, match="expected embeddings of the shape that the layer returns"):
        inside(torch.zeros(1, 2, 6).double(), IDS)
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(model(IDS), model.tail(model.words(IDS)))


def test_wrong_layers_are_refused(model):
    with pytest.raises(ValueError, match="no layer is called 'wrods'. The model has words, mix"):
        Embedded(model, "wrods")
    with pytest.raises(TypeError, match="by name only when"):
        Embedded(lambda ids: model(ids), "words")
    with pytest.raises(TypeError, match="torch.nn.Module or its name"):
        Embedded(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ran 0 times.*Is it part of this model"):
        Embedded(model, nn.Linear(2, 2)).embed(IDS)
    with pytest.raises(ValueError, match="ran 2 times"):
        Embedded(lambda ids: model(ids) + model(ids), model.words).embed(IDS)
