"""One pass over chunks gives what the whole would."""

import torch

from smoothhess.evaluate.streaming_covariance import Moments


def test_chunks_merge_to_the_whole():
    rng = torch.Generator().manual_seed(0)
    values = 1e6 + torch.randn(3, 4, 101, generator=rng, dtype=torch.float64).cumsum(2)  # a drift between chunks
    moments = Moments(places=4, methods=3)
    for chunk in values.split([1, 7, 50, 43], 2):
        moments.add(chunk)
    assert moments.n == 101
    torch.testing.assert_close(moments.mean, values.mean(2).T, rtol=1e-14, atol=0)
    for place in range(4):
        expected = torch.cov(values[:, place]) / 101
        torch.testing.assert_close(moments.covariance_of_mean[place], expected, rtol=1e-9, atol=0)
