"""One hidden neuron with a known smoothed Hessian.

A unit of the first layer, relu(w·x + b), has the smoothed Hessian φ(s/τ)/τ w wᵀ with s = w·x + b and τ = σ‖w‖. The
estimate must agree with it, and the closed form must be exact.
"""

import math

import torch
from torch import nn

import smoothhess as sh

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).double()
x, sigma, unit = torch.randn(1, 12).double(), 0.5, 7

w, b = model[0].weight[unit].detach(), model[0].bias[unit].detach()
s, tau = float(x[0] @ w + b), sigma * float(w.norm())
truth = math.exp(-((s / tau) ** 2) / 2) / math.sqrt(2 * math.pi) / tau * w[:, None] * w

explainer = sh.NeuronSmoothHess(model, model[1])  # the output of the first ReLU
result = explainer.attribute(x, unit, sigma=sigma)
print(f"closed form: off by {float((result.hessian[0] - truth).norm() / truth.norm()):.1e}")
assert torch.allclose(result.hessian[0], truth, atol=1e-9)

# The model as a black box: sampled, with error bars that can be compared with the true error.
sampled = explainer.attribute(x, unit, sigma=sigma, control=None, shrink=False, n_calls=2400)
z = (sampled.hessian - truth) / sampled.stderr()
print(
    f"sampled: {float((z.abs() < 2).double().mean()):.0%} of the entries within two standard errors; "
    f"relative error {float(sampled.relative_error):.0%}"
)
assert float((z.abs() < 2).double().mean()) > 0.85
assert float(z.abs().max()) < 6

# A unit of the second layer, before its ReLU, depends on the kinks of the first; a slice sums over units.
deep = sh.NeuronSmoothHess(model, model[3])
before = deep.attribute(x, 5, attribute_to_neuron_input=True, sigma=sigma)
together = deep.attribute(x, (slice(None),), sigma=sigma)
print(f"pre-activation of a deeper unit: relative error {float(before.relative_error):.3f}")
print(f"sum over its layer: relative error {float(together.relative_error):.3f}")
assert bool(before.relative_error < 0.1)
assert bool(together.relative_error < 0.1)

sampled.plot("heatmap").figure.savefig("neuron.png", dpi=110)
