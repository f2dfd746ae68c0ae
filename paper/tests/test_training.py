import dataclasses
from functools import partial

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from torch.optim import SGD, RMSprop

from paper import training
from paper.augmentation import paper_augmentation
from paper.datasets import Split, four_quadrant, mnist, plane_grid
from paper.networks import MLP, VGG, image_mlp, plane_mlp
from paper.tests.test_datasets import write_idx
from paper.training import Checkpoint, Recipe, mean_score, milestones, train
from smoothhess.model.weight_files import load_weights

pytestmark = pytest.mark.rounding


def images(n=50):
    generator = torch.Generator().manual_seed(0)
    return Split(torch.rand(n, 3, 8, 8, generator=generator), torch.randint(0, 10, (n,), generator=generator))


def classifier(seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(VGG((2, 3)), nn.BatchNorm1d(10), nn.Dropout(0.3))


IMAGES = Recipe(
    n_steps=12,
    batch_size=8,
    optimizer=partial(SGD, momentum=0.9, weight_decay=1e-3),
    rate=milestones(0.05, (5, 9)),
    loss=functional.cross_entropy,
    score=training.correct,
    augment=paper_augmentation,
)


class PulledPlugError(Exception):
    pass


def interrupted_at(recipe, step):
    """The same recipe, pulled out of the socket at a step."""

    def rate(now):
        if now == step:
            raise PulledPlugError
        return recipe.rate(now)

    return dataclasses.replace(recipe, rate=rate)


@pytest.mark.parametrize("optimizer", [IMAGES.optimizer, RMSprop], ids=["momentum", "rmsprop"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer):
    recipe = dataclasses.replace(IMAGES, optimizer=optimizer)
    straight, resumed = classifier(), classifier()
    expected = train(straight, images(), recipe, seed=5)
    options = {"seed": 5, "checkpoint": Checkpoint(tmp_path / "c.safetensors", every=4)}
    with pytest.raises(PulledPlugError):
        train(resumed, images(), interrupted_at(recipe, 7), **options)
    another = classifier(seed=99)  # its own weights do not matter
    got = train(another, images(), recipe, **options)
    assert all(torch.equal(v, another.state_dict()[k]) for k, v in straight.state_dict().items())
    assert (got.loss, got.scores) == (expected.loss, expected.scores)
    again = train(classifier(), images(), recipe, **options)  # finished: nothing is left to do
    assert (again.loss, again.scores) == (expected.loss, expected.scores)


def test_a_checkpoint_is_one_complete_safetensors_file(tmp_path):
    path = tmp_path / "deep" / "c.safetensors"
    train(classifier(), images(), IMAGES, checkpoint=Checkpoint(path, every=5))
    assert [p.name for p in path.parent.iterdir()] == ["c.safetensors"]
    with safe_open(path, "pt") as stored:
        names = set(stored.keys())
    assert "optimizer.0.momentum_buffer" in names
    assert "network.0.features.0.weight" in names


def test_a_foreign_checkpoint_raises(tmp_path):
    path = tmp_path / "c.safetensors"
    train(classifier(), images(), IMAGES, checkpoint=Checkpoint(path))
    with pytest.raises(ValueError, match=r"c\.safetensors: expected .*'seed': 1.* got .*'seed': 0"):
        train(classifier(), images(), IMAGES, checkpoint=Checkpoint(path), seed=1)
    with pytest.raises(ValueError, match="n_parameters"):
        train(VGG((2, 4)), images(), IMAGES, checkpoint=Checkpoint(path))


def test_chance_depends_on_the_seed_alone():
    state = torch.random.get_rng_state()
    first, second, other = classifier(), classifier(), classifier()
    train(first, images(), IMAGES)
    torch.rand(7)
    train(second, images(), IMAGES)
    train(other, images(), IMAGES, seed=1)
    weights = [network.state_dict()["0.classifier.weight"] for network in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.random.set_rng_state(state)
    train(classifier(), images(), IMAGES)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_every_example_is_seen_once_in_an_epoch():
    seen = [torch.cat([training._rows(50, 8, step, 0) for step in range(7 * e, 7 * e + 7)]) for e in (0, 1)]
    assert sorted(seen[0].tolist()) == sorted(seen[1].tolist()) == list(range(50))
    assert seen[0].tolist() != seen[1].tolist()


def test_scores_are_means_over_whole_splits():
    network = MLP((4, 3)).eval()
    data = Split(torch.randn(2_345, 4), torch.randint(0, 3, (2_345,)))
    direct = (network(data.inputs).argmax(1) == data.targets).double().mean().item()
    assert mean_score(network, data) == pytest.approx(direct, abs=1e-12)


def test_a_plane_network_learns_the_four_quadrants():
    points = plane_grid(0.05)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = plane_mlp((64, 64))
    recipe = dataclasses.replace(training.FOUR_QUADRANT, n_steps=600, rate=milestones(1e-3, (400,)))
    result = train(network, Split(points, four_quadrant(points)), recipe)
    assert not network.training
    assert result.scores["train"] < 0.05 * four_quadrant(points).var().item()


def test_a_loss_that_explodes_stops_the_run(tmp_path):
    recipe = dataclasses.replace(training.FOUR_QUADRANT, n_steps=50, optimizer=SGD, rate=milestones(1e6, ()))
    points = plane_grid(0.5)
    path = tmp_path / "c.safetensors"
    with pytest.raises(FloatingPointError, match="at step"):
        train(plane_mlp((8, 8)), Split(points, four_quadrant(points)), recipe, checkpoint=Checkpoint(path))
    assert not path.exists()


def test_the_papers_learning_rates():
    assert [training.IMAGE_MLP.rate(s) for s in (0, 3_999, 4_000, 8_000)] == pytest.approx([0.01, 0.01, 1e-3, 1e-4])
    rate, last = training.CIFAR10.rate, training.CIFAR10.n_steps
    assert [rate(0), rate(5 * 313), rate(last)] == pytest.approx([0.01, 0.5, 1e-5])
    assert max(rate(s) for s in range(last)) == pytest.approx(0.5)


def test_the_command_trains_and_writes_weights(tmp_path, capsys, monkeypatch):
    write_idx(tmp_path / "MNIST" / "raw", n_train=60)
    out = tmp_path / "mlp.safetensors"
    tiny = partial(training._image_splits, partial(mnist, n_val=10))
    monkeypatch.setitem(training._RUNS, "mnist-mlp", (image_mlp, training.IMAGE_MLP, tiny))
    training.main(["mnist-mlp", "--data", str(tmp_path), "--out", str(out), "--steps", "3", "--device", "cpu"])
    assert "mnist-mlp: accuracy train" in capsys.readouterr().out
    assert load_weights(image_mlp(), out)["run"] == "mnist-mlp"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MNIST", "mlp.safetensors"]

    with pytest.raises(SystemExit) as caught:
        training.main(["mnist-mlp", "--data", str(tmp_path / "none"), "--out", str(out)])
    assert caught.value.code == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_frozen_layer_stays_as_it_is():
    """Also where an earlier training has left gradients in it, which an optimiser would use."""
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    line = Split(torch.linspace(-1, 1, 20)[:, None], torch.linspace(-3, 3, 20))
    recipe = dataclasses.replace(IMAGES, n_steps=5, loss=training._mean_squared_error, score=training.squared_error)
    recipe = dataclasses.replace(recipe, augment=None)
    train(network, line, recipe)
    network[0].requires_grad_(False)
    before = network[0].weight.clone(), network[2].weight.clone()
    train(network, line, dataclasses.replace(recipe, optimizer=SGD))
    assert torch.equal(network[0].weight, before[0])
    assert not torch.equal(network[2].weight, before[1])
