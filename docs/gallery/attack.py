"""An attack as a test of an explanation.

If the surrogate f(x) + Gᵀδ + ½δᵀHδ is accurate, the step that minimizes it should lower the output of the model. The
script compares exact steps inside a ball, from SmoothHess and SmoothGrad, with a random direction, on the same images.
On this network the Hessian does not make the attack stronger.
"""

import warnings

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import smoothhess as sh

torch.manual_seed(0)
data = load_digits()
images, labels = torch.tensor(data.images / 16).float(), torch.tensor(data.target)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    for rows in torch.randperm(1500).split(64):
        adam.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        adam.step()
model.eval()

x = images[1500:1560]
labels = model(x).argmax(1)


def probability(x):
    """Return the probabilities of all classes."""
    return model(x).softmax(-1)


# Probabilities of confident predictions rest on a few draws; an attack needs a direction, and tests it itself.
warnings.filterwarnings("ignore", "a few draws carry the estimate")
result = sh.SmoothHess(probability).attribute(x, target=labels, sigma=0.1, n_calls=512)
comparison = sh.evaluate.post_hoc(
    model,
    x,
    {
        "SmoothHess": result,
        "SmoothGrad": result.taylor(1),
        "random": sh.baselines.random(probability, x, labels),
    },
    radii=[0.25, 0.5, 0.75, 1.0],
)
print(comparison)
error = result.relative_error
print(f"relative error {float(error.median()):.0%} in the median, {float(error.max()):.0%} at most")

moved = sh.attack(result, 1.0)
steps = (moved - x).flatten(1).norm(dim=1)
assert (steps <= 1.0 + 1e-5).all()
step = sh.minimize_in_ball(result.gradient.flatten(1).double(), result.hessian.double(), 1.0)
residual = sh.evaluate.kkt_residual(result.gradient.flatten(1).double(), result.hessian.double(), 1.0, step)
print(f"largest residual of the optimality conditions: {float(residual.max()):.0e}")
assert float(residual.max()) < 1e-6  # the step satisfies the optimality conditions of the global minimum

unchanged = comparison.unchanged.double().mean(-1)  # (methods, radii)
assert (unchanged[0] <= unchanged[2]).all()  # no weaker than chance at any radius
assert float(unchanged[0, -1]) < 0.5

with torch.no_grad():
    fall = result.output - probability(moved).gather(1, labels[:, None])[:, 0]
print(f"median fall of the probability at radius 1: {float(fall.median()):.2f}")
assert float(fall.median()) > 0.5

figure = Figure(figsize=(9, 3), layout="constrained")
left, *panels = figure.subplots(1, 4, width_ratios=[1.6, 1, 1, 1])
for name, share, line in zip(comparison.methods, unchanged, ("o-", "s--", "^:"), strict=True):
    left.plot(comparison.radii, 100 * share, line, markerfacecolor="none", label=name)
left.set(xlabel="radius of the attack", ylabel="predictions unchanged, %", ylim=(0, 100))
left.legend()
i = int((comparison.unchanged[0, 1] == 0).nonzero()[0])  # the first image whose class changes at radius 0.5
step = sh.attack(result, 0.5)[i] - x[i]
limit = float(step.abs().max())
for ax, shown, title in zip(panels, (x[i], step, x[i] + step), ("image", "step, radius 0.5", "attacked"), strict=True):
    colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit} if ax is panels[1] else {"cmap": "gray_r"}
    ax.imshow(shown, **colours)
    ax.set(title=title, xticks=[], yticks=[])
panels[0].set_xlabel(f"taken for {int(labels[i])}")
panels[2].set_xlabel(f"taken for {int(model((x + step)[i : i + 1]).argmax())}")
figure.savefig("attack.png", dpi=110)
