"""A small model of token ids, and results of it."""

from functools import lru_cache

import torch
from torch import nn

import smoothhess as sh

TOKENS = ["<s>", "Not", "Ġso", "Ġun", "believ", "able", ",", "Ġso", "Ġgood", "."]


class Words(nn.Module):
    """Tokens 1 and 8 of a text act together, all others are nearly additive."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(40, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, ids):
        e = self.mix(self.wte(ids)).tanh()
        return e.sum((1, 2)) + (e[:, 1] * e[:, -2]).sum(1) if ids.shape[1] > 2 else e.sum((1, 2))


@lru_cache
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Words().double()


def ids(count=10, batch=1):
    return torch.arange(count * batch).reshape(batch, count) % 40


@lru_cache  # results are frozen
def result(count=10, batch=1, **options):
    names = {"names": tuple(TOKENS)} if count == len(TOKENS) else {}
    given = {"sigma": 0.2, "n_calls": 200, **names, **options}
    return sh.TokenSmoothHess(model(), "wte").attribute(ids(count, batch), **{k: _list(v) for k, v in given.items()})


def _list(value):
    return [_list(each) for each in value] if isinstance(value, tuple) else value
