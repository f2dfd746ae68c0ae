"""Intervals of a curve that act together.

A 1-D convolutional network is trained on curves with a synthetic label: the mean of the first quarter times the mean of
the third, plus the mean of the last. The label has one interaction, that of the first and the third quarter.
"""

import torch
from torch import nn

import smoothhess as sh
from smoothhess import segments

torch.manual_seed(0)
length = 96


def curves(n):
    """Smooth random curves of `length` points."""
    rough = torch.randn(n, 1, length // 8 + 4)
    return nn.functional.interpolate(rough, length, mode="linear") + 0.1 * torch.randn(n, 1, length)


def label(x):
    """Two quarters act together, one alone."""
    quarter = x[:, 0].unflatten(-1, (4, -1)).mean(-1)
    return 4 * quarter[:, 0] * quarter[:, 2] + quarter[:, 3]


model = nn.Sequential(
    nn.Conv1d(1, 16, 9, stride=3, padding=4), nn.ReLU(), nn.Conv1d(16, 32, 9, stride=4, padding=4), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 8, 64), nn.ReLU(), nn.Linear(64, 1),
)  # fmt: skip
adam = torch.optim.Adam(model.parameters(), 2e-3)
for _ in range(1200):
    x = curves(64)
    adam.zero_grad()
    nn.functional.mse_loss(model(x)[:, 0], label(x)).backward()
    adam.step()
test = curves(1000)
with torch.no_grad():
    explained = 1 - float((model(test)[:, 0] - label(test)).square().mean() / label(test).var())
print(f"the network explains {explained:.0%} of the label")
assert explained > 0.9

# Sixteen curves are explained with three kinds of noise. The first shifts whole intervals of twelve points. The second
# has the covariance of the curves, so that neighbouring points are correlated. The third is independent, and produces
# fluctuations that no curve of the data has.
windows = segments.windows((1, length), 12, unit="points")
x = test[:16]
kinds = {
    "whole intervals": segments.noise(windows, 0.5),
    "noise like the data": sh.Dense.from_data(test, scale=0.5, ridge=0.1),
    "independent noise": sh.Isotropic(0.2),
}
results = {}
for name, noise in kinds.items():
    results[name] = sh.SmoothHess(model).attribute(x, gaussian=noise, feature_mask=windows, n_calls=800)

# Intervals 0 and 1 are the first quarter, 4 and 5 the third: 4 · ½ · ½ = 1 for each of these four pairs.
for name, found in results.items():
    planted, error = found.hessian[:, :2, 4:6].flatten(1).mean(1), float(found.relative_error.max())
    spread = f"{float(planted.min()):.2f} to {float(planted.max()):.2f}"
    print(f"{name}: planted pairs {float(planted.mean()):.2f} on average (label: 1), {spread} from curve to curve")
    print(f"    relative error {error:.0%} at most")
    assert error < 0.2
result = results["whole intervals"]
mean = result.hessian.mean(0)
others = mean.clone()
others[:2, 4:6] = others[4:6, :2] = 0
others.fill_diagonal_(0)
print(f"largest of all other pairs: {float(others.abs().max()):.2f}")
assert (mean[:2, 4:6] - 1).abs().max() < 0.3
assert others.abs().max() < 0.2

result.plot("series", source=0).figure.savefig("curve_cnn.png", dpi=110)
