"""Mean and covariance of several methods' errors over samples, accumulated in one pass."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Means (P, M) and comoments (P, M, M) of M numbers per sample at each of P points, accumulated by chunks.

    >>> moments = Moments(places=1, methods=2)
    >>> moments.add(torch.tensor([[[1.0, 3.0]], [[2.0, 6.0]]]))
    >>> moments.mean, moments.covariance_of_mean
    (tensor([[2., 4.]], dtype=torch.float64), tensor([[[1., 2.],
             [2., 4.]]], dtype=torch.float64))
    """

    def __init__(self, places: int, methods: int) -> None:
        self.n = 0
        self.mean = torch.zeros(places, methods, dtype=torch.float64)
        self._comoment = torch.zeros(places, methods, methods, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add a chunk of samples, (M, P, c)."""
        values = values.double().permute(1, 0, 2)  # (P, M, c)
        count = values.shape[2]
        mean = values.mean(2)
        centred = values - mean[..., None]
        step = mean.cpu() - self.mean
        total = self.n + count
        # Chan, Golub & LeVeque: no cancellation, unlike sums of squares
        self._comoment += (centred @ centred.mT).cpu() + step[:, :, None] * step[:, None] * (self.n * count / total)
        self.mean += step * (count / total)
        self.n = total

    @property
    def covariance_of_mean(self) -> Tensor:
        """Covariance of the means, (P, M, M); its diagonal holds squared standard errors."""
        return self._comoment / (self.n * (self.n - 1))
