"""A 3×64×64 image, 12 288 features, by segments.

A few hundred gradient calls cannot estimate a Hessian of 12 288 × 12 288 numbers, but they can estimate sums over
segments. A convolutional network learns a label in which two of sixteen squares interact, and the sums must find that
pair. The noise shifts whole squares: all pixels of a square shift by the same number.
"""

import torch
from torch import nn

import smoothhess as sh
from smoothhess import segments

torch.manual_seed(0)
squares = segments.grid((3, 64, 64), 4)  # sixteen squares of 16 × 16 pixels


def images(n):
    """Coloured squares with noise."""
    base = torch.randn(n, 3, 4, 4).repeat_interleave(16, 2).repeat_interleave(16, 3)
    return base + 0.3 * torch.randn(n, 3, 64, 64)


def label(x):
    """Brightness of squares 5 and 10 together, and of square 0 alone."""
    brightness = nn.functional.avg_pool2d(x.mean(1, keepdim=True), 16).flatten(1)
    return 3 * brightness[:, 5] * brightness[:, 10] + brightness[:, 0]


model = nn.Sequential(
    nn.Conv2d(3, 12, 4, stride=4), nn.ReLU(), nn.Conv2d(12, 24, 4, stride=4), nn.ReLU(),
    nn.Flatten(), nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 1),
)  # fmt: skip
adam = torch.optim.Adam(model.parameters(), 2e-3)
for _ in range(600):
    x = images(32)
    adam.zero_grad()
    nn.functional.mse_loss(model(x)[:, 0], label(x)).backward()
    adam.step()
test = images(200)
with torch.no_grad():
    explained = 1 - float((model(test)[:, 0] - label(test)).square().mean() / label(test).var())
print(f"the network explains {explained:.0%} of the label")
assert explained > 0.8

x = test[:1]
# Noise that shifts whole squares by 0.25: a problem of 16 dimensions. Independent noise would hardly change the mean
# brightness of 768 pixels, and measure the curvature of the network for tiny changes of it.
noise = segments.noise(squares, 0.25)
result = sh.SmoothHess(model).attribute(x, gaussian=noise, feature_mask=squares, n_calls=400)
print(f"relative error {float(result.relative_error):.0%} after {int(result.n_calls)} calls")
for pair in result.top_pairs(3)[0]:
    print(f"{' × '.join(pair.names)}: {pair.value:+.2f} in [{pair.low:+.2f}, {pair.high:+.2f}]")
first, second = result.top_pairs(2)[0]
assert (first.i, first.j) == (5, 10)
assert first.significant
assert abs(first.value - 3) < 1  # the interaction of the label
assert abs(second.value) < abs(first.value) / 3

# Without a mask factors are kept, never a 12 288 × 12 288 matrix, and sums over other groups can be computed later.
whole = sh.SmoothHess(model).attribute(x, gaussian=noise, n_calls=400)
print(f"relative error without a mask {float(whole.relative_error):.0%}")
assert (whole @ torch.ones_like(x)).shape == x.shape
assert whole.groups(squares.mask // 4).shape == (1, 4, 4)  # the four rows of squares

result.plot("segment", source=5).figure.savefig("large_image.png", dpi=110)
