"""Comparison with the Hessian of a softened network.

The usual alternative for a ReLU network is to replace each relu by a SoftPlus and to differentiate the result. The
script measures how close the surrogates f(x) + Gᵀδ + ½δᵀHδ of both methods are to the model inside a ball. σ and β are
chosen on validation points, and the methods are compared by the paired difference on other points.
"""

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import smoothhess as sh
from smoothhess import baselines
from smoothhess.evaluate import compare, select

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

radius = 0.5
validation, x = images[1500:1520], images[1520:1560]
target, predicted = model(validation).argmax(1), model(x).argmax(1)
sigma = select(model, validation, radius=radius, target=target, n_calls=256).best
beta = select(model, validation, radius=radius, target=target, method="softplus", coarse_to_fine=True).best
print(f"chosen on {len(validation)} validation images: σ = {sigma:.3f}, β = {beta:.3g}")

smooth = sh.SmoothHess(model).attribute(x, target=predicted, sigma=sigma, n_calls=1024)
print(f"relative error {float(smooth.relative_error.max()):.0%} at most")
soft = baselines.softplus(model, x, predicted, beta=beta)
table = compare(
    model,
    x,
    {
        "SmoothHess": smooth.taylor(),
        "SmoothGrad": smooth.taylor(1),
        "SoftPlus H+G": soft.taylor(),
        "gradient": baselines.gradient(model, x, predicted).taylor(1),
    },
    [radius],
    target=predicted,
)
print(table)

for baseline in table.methods[1:]:
    ahead = table.difference("SmoothHess", baseline)
    print(f"less than {baseline} by {-float(ahead.value):.1e}, p = {float(ahead.p_value):.0e}")
    assert float(ahead.value) < 0

# The two Hessians are similar where σ and β are chosen well, but not identical.
a, b = smooth.hessian.flatten(1), soft.hessian.flatten(1)
cosine = nn.functional.cosine_similarity(a, b)
print(f"cosine between the two Hessians: {float(cosine.median()):.2f} in the median")
assert 0.5 < float(cosine.median()) < 0.999

scores = {name: table.errors[m, 0] for m, name in enumerate(table.methods)}
figure = Figure(figsize=(6, 3), layout="constrained")
ax = figure.subplots()
for row, errors in enumerate(scores.values()):
    ax.plot(errors, torch.full_like(errors, row), "|", color="tab:blue", alpha=0.6)
    ax.plot(errors.mean(), row, "o", color="black")
ax.set(xscale="log", yticks=range(len(scores)), yticklabels=list(scores), ylim=(len(scores) - 0.5, -0.5))
ax.set_xlabel(f"P_MSE in the ball of radius {radius}, left is better\nstrokes: images, dots: means")
figure.savefig("softplus_hessian.png", dpi=110)
