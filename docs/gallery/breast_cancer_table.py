"""Named columns of a table, each moved in proportion to its standard deviation.

A network classifies tumours as benign or malignant from 30 measurements. Columns are standardised, so σ = 0.25 moves
each by a quarter of its standard deviation. Strong pairs are then compared with second differences of the model.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import smoothhess as sh

torch.manual_seed(0)
data = load_breast_cancer()
names = [str(name) for name in data.feature_names]
columns, labels = torch.tensor(data.data).float(), torch.tensor(data.target)
columns = (columns - columns.mean(0)) / columns.std(0)
order = torch.randperm(len(columns))
train, test = order[:400], order[400:]
model = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(40):
    for rows in train[torch.randperm(400)].split(64):
        noisy = columns[rows] + 0.25 * torch.randn(len(rows), 30)
        adam.zero_grad()
        nn.functional.cross_entropy(model(noisy), labels[rows]).backward()
        adam.step()
accuracy = (model(columns[test]).argmax(1) == labels[test]).float().mean()
print(f"test accuracy {accuracy:.0%}")
assert accuracy > 0.9

confidence = model(columns[test]).softmax(-1).max(1).values
patient = columns[test[confidence.argsort()[:3]]]  # the three patients with the least confident predictions
result = sh.SmoothHess(model).attribute(patient, target=1, sigma=0.25, names=names)
print(f"relative error {float(result.relative_error.max()):.0%} at most, {int(result.n_calls.max())} calls")
for pair in result.top_pairs(5)[0]:
    print(f"{' × '.join(pair.names)}: {pair.value:+.3f} in [{pair.low:+.3f}, {pair.high:+.3f}]")
assert all(pair.significant for pair in result.top_pairs(5)[0])

# The effect of moving both columns, beyond the sum of the effects of each, at steps of the noise's radius σ√d:
found = sh.evaluate.validate_pairs(model, result, 10)
print(found.around)
half = found.steps.tolist().index(0.5)  # half of that radius
assert float(found.around.rank_correlation[half].mean()) > 0.8

result.plot("graph", k=15).figure.savefig("breast_cancer_table.png", dpi=110)
