"""Where networks come from, and what is explained of them."""

from dataclasses import replace

import pytest
import torch

from paper.classifiers import CLASSIFIERS, NoWeightsError, Readout, selected
from paper.networks import MLP, image_mlp, resnet18
from paper.options import Options
from paper.tests.stand_ins import RECIPE, images, mlp_source, resnet_source, untrained
from smoothhess import NeuronSmoothHess, SmoothHess
from smoothhess.model.weight_files import save_weights

pytestmark = pytest.mark.rounding


def test_a_network_is_trained_once_and_kept(tmp_path, monkeypatch):
    options, source = Options(tmp_path), mlp_source()
    first = source.classifier(options)
    assert source.path(options).name == "mnist-mlp-60-steps-seed-0.safetensors"
    assert "trained here, 60 steps, accuracy" in first.words
    monkeypatch.setattr("paper.classifiers.train", None)
    again = source.classifier(options)
    assert again.fingerprint == first.fingerprint
    assert not again.network.training


def test_the_fingerprint_follows_every_weight(tmp_path):
    found = mlp_source().classifier(Options(tmp_path))
    before = found.fingerprint
    with torch.no_grad():
        found.network.f[0].bias[3] += 1e-6
    assert found.fingerprint != before


def test_a_quick_run_trains_shortly_and_keeps_it_apart(tmp_path):
    source = mlp_source(recipe=replace(RECIPE, n_steps=50_000))
    options = Options(tmp_path, quick=True)
    assert source.path(options).name == "mnist-mlp-1200-steps-seed-0.safetensors"
    assert source.path(replace(options, quick=False)).name == "mnist-mlp-50000-steps-seed-0.safetensors"


def test_given_weights_are_taken_where_there_are_no_trained_ones(tmp_path):
    given = MLP((12, 16, 16, 4))
    save_weights(given, tmp_path / "given.safetensors")
    source = mlp_source(given="given.safetensors")
    options = Options(tmp_path / "out", data=tmp_path)
    found = source.classifier(options)
    assert found.words.startswith("given weights, given.safetensors, test accuracy")
    assert torch.equal(found.network.f[0].weight, given.f[0].weight)
    save_weights(MLP((12, 16, 16, 4)), source.path(options), steps="60")
    assert source.classifier(options).words.startswith("trained here, 60 steps")


def test_without_weights_it_says_what_to_do(tmp_path):
    with pytest.raises(NoWeightsError, match="no weights at .*nothing.pth"):
        mlp_source(recipe=None, run=None, given="nothing.pth").classifier(Options(tmp_path))
    with pytest.raises(NoWeightsError, match=r"On a GPU: python -m paper.training cifar10-resnet18"):
        resnet_source().classifier(Options(tmp_path))


def test_the_readout_is_scores_and_pre_activations():
    x = torch.rand(5, 1, 3, 4)
    net = MLP((12, 16, 16, 4)).eval()
    found = Readout(net, net.f[-2], 4).eval()(x)
    torch.testing.assert_close(found, torch.cat([net(x), net.f[:-2](x.flatten(1))], 1))
    small = resnet18(width=2).eval()
    seen = []
    handle = small.avgpool.register_forward_hook(lambda _, __, out: seen.append(out.flatten(1)))
    images = torch.rand(2, 3, 32, 32)
    scores = small(images)
    handle.remove()
    torch.testing.assert_close(Readout(small, small.fc, 10).eval()(images), torch.cat([scores, seen[0]], 1))


def test_its_neurons_are_those_of_neuron_smoothhess():
    torch.manual_seed(0)
    net = MLP((12, 16, 16, 4)).double().eval()
    readout = Readout(net, net.f[-2], 4).eval()
    x = torch.rand(2, 1, 3, 4).double()
    ours = SmoothHess(readout).attribute(x, readout.unit(7), radius=0.5, n_calls=60)
    theirs = NeuronSmoothHess(net, net.f[-2]).attribute(x, 7, attribute_to_neuron_input=True, radius=0.5, n_calls=60)
    torch.testing.assert_close(ours.hessian, theirs.hessian, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.gradient, theirs.gradient, rtol=1e-10, atol=1e-12)


def test_units_are_the_most_active_ones():
    torch.manual_seed(0)
    net, data = MLP((12, 16, 16, 4)), images()
    found = untrained(net, net.f[-2], data)
    with torch.no_grad():
        before = net.f[:-2](data.train.inputs.flatten(1))
    assert found.most_active_unit() == int(before.mean(0).argmax())
    assert found.most_active_unit(3) == int(before[data.train.targets == 3].mean(0).argmax())


def test_the_papers_networks():
    assert [source.key for source in CLASSIFIERS] == ["mnist-authors", "mnist", "fmnist", "cifar10"]
    assert CLASSIFIERS[0].penultimate(net := image_mlp()) is net.f[-2]
    assert CLASSIFIERS[3].penultimate(net := resnet18(width=2)) is net.fc
    with pytest.raises(ValueError, match="--dataset: expected one of mnist, fmnist, cifar10, got 'nhanes'"):
        selected(Options(__import__("pathlib").Path("out"), dataset="nhanes"))
