"""Products with the Hessian of a softened network, against differentiating it twice."""

import copy

import pytest
import torch

from paper import curvature
from paper.curvature import softened
from paper.networks import MLP, resnet18
from smoothhess import baselines
from smoothhess.baselines.softplus import Softplus
from smoothhess.baselines.swish import Swish

FORMS = {"softplus": (Softplus(3.0), baselines.softplus), "swish": (Swish(3.0), baselines.swish)}


def cases():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {
            "mlp": (MLP((12, 16, 16, 5)).double().eval(), torch.randn(3, 1, 3, 4).double()),
            "resnet": (resnet18(width=2).double().eval(), torch.randn(2, 3, 6, 6).double()),
        }


CASES = cases()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("probability", [False, True])
def test_is_the_hessian_of_the_softened_network(case, form, probability):
    net, x = CASES[case]
    target = net(x).argmax(1)
    shape, truth = FORMS[form]
    found = softened(net, x, target, shape, probability=probability)
    expected = truth((lambda x: net(x).softmax(-1)) if probability else net, x, target, beta=3.0)
    for name in ("hessian", "gradient", "output", "value"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_without_a_form_it_is_the_networks_own(case):
    net, x = CASES[case]
    target = net(x).argmax(1)
    found = softened(net, x, target, None, probability=True)
    expected = baselines.hessian(lambda x: net(x).softmax(-1), x, target)
    torch.testing.assert_close(found.hessian, expected.hessian, rtol=1e-11, atol=1e-14)
    assert not softened(net, x, target, None).hessian.any()


def test_a_saturated_softmax_loses_no_digits():
    """In float32, where 1 − p is rounding: against float64."""
    torch.manual_seed(1)
    net = MLP((6, 12, 4))
    with torch.no_grad():
        net.f[-1].weight.mul_(60)
    x = torch.randn(8, 6)
    target = net(x).argmax(1)
    single = softened(net, x, target, Softplus(2.0), probability=True)
    double = softened(copy.deepcopy(net).double(), x.double(), target, Softplus(2.0), probability=True)
    assert bool((double.output > 1 - 1e-6).any())
    for name in ("gradient", "hessian"):
        a, b = (getattr(r, name).double().flatten(1) for r in (single, double))
        assert float(((a - b).norm(dim=1) / b.norm(dim=1)).max()) < 1e-3  # the scores themselves are ± 1e-5


def test_batches_and_selections_do_not_change_it(monkeypatch):
    net, x = CASES["mlp"]
    target = net(x).argmax(1)
    rows = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0)).double()
    whole = softened(net, x, target, Softplus(3.0)).taylor().product(rows)
    monkeypatch.setattr(curvature, "MOST_ROWS", {"cpu": 4})
    monkeypatch.setattr(curvature, "EXAMPLES", 2)
    cut = softened(net, x, target, Softplus(3.0))
    torch.testing.assert_close(cut.taylor().product(rows), whole, rtol=1e-12, atol=1e-14)
    chosen = cut[[2, 0]]
    torch.testing.assert_close(chosen.taylor().product(rows[[2, 0]]), whole[[2, 0]], rtol=1e-12, atol=1e-14)


def test_directions_of_no_length_give_nothing():
    net, x = CASES["mlp"]
    found = softened(net, x, net(x).argmax(1), Softplus(3.0)).taylor().product(torch.zeros(3, 2, 12).double())
    assert not found.any()


def test_the_network_is_given_back_as_it_was():
    net, x = CASES["resnet"]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    flags = [p.requires_grad for p in net.parameters()]
    state = torch.random.get_rng_state()
    _ = softened(net, x, net(x).argmax(1), Swish(2.0)).hessian
    assert torch.equal(state, torch.random.get_rng_state())
    assert flags == [p.requires_grad for p in net.parameters()]
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(ValueError, match="training mode"):
        softened(resnet18(width=2).double().train(), x, torch.tensor([0, 1]), Swish(2.0))


def test_tf32_is_for_gpus():
    net, x = CASES["mlp"]
    with pytest.raises(ValueError, match="tf32"):
        softened(copy.deepcopy(net).float(), x.float(), torch.tensor([0, 1, 2]), Softplus(1.0), precision="tf32")
