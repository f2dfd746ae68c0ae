"""P_MSE of many surrogates at once, against `compare`."""

import pytest
import torch

from paper import balls as balls_module
from paper.balls import SAMPLERS, Balls, Forms
from paper.classifiers import Readout
from paper.networks import MLP
from smoothhess import SmoothHess, baselines
from smoothhess.evaluate import ball_samples, compare
from smoothhess.evaluate.ball_samples import BallSamples
from smoothhess.linalg.memory import ByteLimit
from smoothhess.model.model_call import ModelCall

RADII = [0.5, 1.0]


@pytest.fixture(scope="module")
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = MLP((12, 16, 16, 5)).double().eval(), torch.randn(3, 1, 3, 4).double()
    readout = Readout(net, net.f[-2], 5).eval()
    return readout, x, {"logit": net(x).argmax(1), "neuron": torch.full((3,), readout.unit(2))}


def test_numbers_and_errors_are_those_of_compare(network):
    readout, x, targets = network
    balls = Balls.around(ModelCall(readout, x), targets, RADII, BallSamples(300, "ball", 4))
    for function, target in targets.items():
        result = SmoothHess(readout).attribute(x, target, radius=0.5, n_calls=100)
        forms = {order: balls.forms(result.taylor(order)) for order in (1, 2)}
        for sampler in SAMPLERS:
            table = compare(
                readout,
                x,
                {str(order): result.taylor(order) for order in forms},
                RADII,
                target,
                n_samples=300,
                sampling=sampler,
                seed=4,
            )
            for m, order in enumerate(forms):
                for r, radius in enumerate(RADII):
                    score = balls.score(function, radius, sampler, forms[order])
                    torch.testing.assert_close(score.per_point, table.errors[m, r], rtol=1e-10, atol=0)
                    assert score.stderr == pytest.approx(float(table.sampling_stderr[m, r]), rel=1e-9)


def test_chunks_do_not_change_it(network, monkeypatch):
    readout, x, targets = network
    samples = BallSamples(130, "ball", 1)
    full = Balls.around(ModelCall(readout, x), targets, [0.5], samples)
    monkeypatch.setattr(ball_samples, "CHUNK_ROWS", 21)
    for module in (balls_module, ball_samples):
        monkeypatch.setattr(module, "BATCH_INPUTS", ByteLimit(1 << 10))
    parts = Balls.around(ModelCall(readout, x, internal_batch_size=5), targets, [0.5], samples)
    torch.testing.assert_close(parts.directions, full.directions, rtol=0, atol=0)
    taylor = baselines.softplus(readout, x, targets["logit"], beta=3.0).taylor()
    for key, values in full.truth.items():
        torch.testing.assert_close(parts.truth[key], values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.forms(taylor).square, full.forms(taylor).square, rtol=1e-12, atol=1e-14)


def test_rough_values_are_put_right_by_the_exact_ones(network):
    """As on a GPU with TF32: all values have a small error, and the first ones are also computed exactly."""
    readout, x, targets = network
    exact = Balls.around(ModelCall(readout, x), targets, [0.5], BallSamples(4_000, "ball", 2))
    rng = torch.Generator().manual_seed(0)
    rough = {key: v + 0.02 * torch.randn(v.shape, generator=rng).double() for key, v in exact.truth.items()}
    first = {key: v[:, :1_000] for key, v in exact.truth.items()}
    off = Balls(exact.inputs, exact.directions, exact.shares, rough, {})
    right = Balls(exact.inputs, exact.directions, exact.shares, rough, first)
    forms = exact.forms(SmoothHess(readout).attribute(x, targets["logit"], radius=0.5, n_calls=400).taylor())
    for sampler in SAMPLERS:
        truth, biased, found = (b.score("logit", 0.5, sampler, forms) for b in (exact, off, right))
        assert float((biased.per_point.mean() - truth.per_point.mean()) / truth.stderr) > 10
        assert abs(float(found.per_point.mean() - truth.per_point.mean())) < 4 * (found.stderr**2 - 0) ** 0.5
        assert truth.stderr < found.stderr < 5 * truth.stderr + 1e-4


def test_a_surrogate_of_first_order_has_no_square(network):
    readout, x, targets = network
    balls = Balls.around(ModelCall(readout, x), targets, [0.5], BallSamples(10, "ball", 0))
    forms = balls.forms(baselines.gradient(readout, x, targets["logit"]).taylor(1))
    assert isinstance(forms, Forms)
    assert forms.square is None
    assert len(balls) == 3
