"""Operations count as possible kinks only where their arguments may depend on the input."""

import torch

from smoothhess.curvature.unknown_operations import unknown_operations

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def found(forward):
    return unknown_operations(forward, X, None)


def test_masks_and_positions_of_the_model_itself_are_ignored():
    def masked(x):
        place = torch.arange(x.shape[1], device=x.device)
        allowed = (place[:, None] >= place) & ~(place == 7)
        weights = (100.0 ** -(place / 3)).cos().round()
        return (x @ torch.where(allowed, 1.0, 0.0) * weights).sum(1)

    assert found(masked) == []

    def multiplied(x):  # by a mask of numbers, which is converted later
        mask = torch.tensor([1.0, 1.0, 0.0])
        return ((x * mask) @ torch.where(~mask.bool(), 0.0, torch.eye(3))).sum(1)

    assert found(multiplied) == []


def test_what_depends_on_the_input_is_found_through_detached_copies_and_views():
    assert found(lambda x: (x * (x.detach() > 0)).sum(1)) == ["gt"]
    assert "gt" in found(lambda x: (x * (x.detach().reshape(-1).view(2, 3)[:, :1] > 0)).sum(1))
    assert "sign" in found(lambda x: (x * (x.detach() * 2).sign()).sum(1))
    assert "relu" in found(lambda x: x.relu().sum(1))

    def copied(x):
        buffer = torch.zeros(2, 3)
        buffer.copy_(x.detach())
        return (x * buffer.floor()).sum(1)

    assert "floor" in found(copied)
