"""How an interaction changes with σ, compared with the exact values.

f(x) = relu(x₀) relu(x₁) + x₂ x₃ at the point (½, ½, 0, 0). The first pair interacts only where both are positive, so
its smoothed interaction is Φ(½/σ)², which falls from 1 to ¼ as the noise reaches the other quadrants; the second is
1 for every σ. Crosses are the exact values. All scales share their draws, so that changes have smaller errors than the
curves suggest.
"""

import torch

import smoothhess as sh
from smoothhess import view


def f(x):
    """Two pairs, one of which is switched off beyond the axes."""
    return x[:, 0].relu() * x[:, 1].relu() + x[:, 2] * x[:, 3]


x = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
sigmas = [0.2, 0.4, 0.8, 1.6, 3.2]
scales = sh.sweep(f, x, sigmas, n_calls=4000)
print(scales)

truth = torch.special.ndtr(0.5 / torch.tensor(sigmas).double()) ** 2
curve, flat = scales.entry(0, 1), scales.entry(2, 3)
low, high = (end[:, 0].tolist() for end in curve.interval())
for sigma, value, a, b, exact in zip(sigmas, curve.value[:, 0].tolist(), low, high, truth.tolist(), strict=True):
    print(f"σ = {sigma}: {value:.3f}, 95 % in [{a:.3f}, {b:.3f}], truth {exact:.3f}")
assert ((curve.value[:, 0] - truth).abs() <= 4 * curve.stderr[:, 0]).all()
assert torch.allclose(flat.value[:, 0], torch.ones(5).double(), atol=0.1)

# Paired differences test whether the change from σ = 0.4 to 0.8 is significant, and that no other pair changes.
change = scales.difference(1, 2).top_pairs(6)[0]
assert change[0].names == ("0", "1")
assert change[0].significant
assert not any(pair.significant for pair in change[1:])

ax = view.sweep_curves(scales, pairs=[(0, 1), (2, 3)])
ax.plot(sigmas, truth, "kx", label="truth of the first", zorder=5)
ax.figure.savefig("sigma_sweep.png", dpi=110)
