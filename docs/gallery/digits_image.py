"""Pixels of a handwritten digit that act together.

A small ReLU network classifies 8×8 digits. Its Hessian is zero; that of the smoothed network is not. The script finds
the strongest pairs of pixels around one test image, checks the intervals with a second run that has many more draws,
and sums pixels to blocks of 2×2.
"""

import warnings

import torch
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
        noisy = images[rows] + 0.25 * torch.randn(len(rows), 8, 8)
        adam.zero_grad()
        nn.functional.cross_entropy(model(noisy), labels[rows]).backward()
        adam.step()
model.eval()
accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
print(f"test accuracy {accuracy:.0%}")
assert accuracy > 0.9

x = images[1500:1501]
target = model(x).argmax(1)
result = sh.SmoothHess(model).attribute(x, target=target, radius=1.0)
print(result)
for pair in result.top_pairs(5)[0]:
    print(f"{' × '.join(pair.names)}: {pair.value:+.2f} in [{pair.low:+.2f}, {pair.high:+.2f}]")
assert bool(result.relative_error < 0.1)  # sampling continued until then
with warnings.catch_warnings():  # baselines.hessian warns that the Hessian is zero, as expected here
    warnings.simplefilter("ignore")
    assert not sh.baselines.hessian(model, x, target).hessian.any()

# A second, longer run with other draws: do the intervals of the first run contain its values?
again = sh.SmoothHess(model).attribute(x, target=target, radius=1.0, n_calls=20_000, seed=1)
held = [pair.low <= float(again.hessian[0, pair.i, pair.j]) <= pair.high for pair in result.top_pairs(20)[0]]
print(f"{sum(held)} of 20 intervals hold the value of a run with {int(again.n_calls / result.n_calls)}× the calls")
assert sum(held) >= 17

blocks = result.unshrunk().groups(torch.arange(16).reshape(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1))
print(f"relative error of the 16 blocks, unbiased: {float(blocks.relative_error):.0%}")
total = result.unshrunk().hessian.sum()
assert torch.allclose(blocks.hessian.sum(), total, rtol=1e-3, atol=1e-3)  # group sums preserve the total

result.plot("image", k=8, cmap="gray_r").figure.savefig("digits_image.png", dpi=110)
