"""Convolutions with kernels as long as the signal, by FFT: the same results in a fraction of the time on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LongConv1d", "with_long_convolutions"]

LONG = 48  # taps from which the FFT is faster for some hundred samples


class LongConv1d(nn.Conv1d):
    """An `nn.Conv1d` with the same parameters, evaluated by FFT on a CPU and by torch's convolution on other devices.

    Only stride, dilation and groups 1 and no padding are supported. Twenty channels, 300 samples and 200 taps take a
    tenth of the time.

    >>> layer = nn.Conv1d(2, 3, 60).double()
    >>> x = torch.randn(4, 2, 100).double()
    >>> torch.allclose(LongConv1d.of(layer)(x), layer(x))
    True
    """

    @staticmethod
    def of(layer: nn.Conv1d) -> LongConv1d:
        """Return the same layer, which shares the parameters of `layer`."""
        if (layer.stride, layer.dilation, layer.groups, layer.padding) != ((1,), (1,), 1, (0,)):
            raise ValueError(f"expected stride, dilation and groups 1 and no padding, got {layer}.")
        long = LongConv1d(layer.in_channels, layer.out_channels, layer.kernel_size[0], bias=False, device="meta")
        long.weight, long.bias = layer.weight, layer.bias
        long.train(layer.training)
        return long

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, T) → (B, C', T − taps + 1)."""
        if input.device.type != "cpu":
            return super().forward(input)
        n, taps = input.shape[-1], self.kernel_size[0]
        # Outputs of the circular correlation of length n are correct wherever the kernel does not wrap around.
        signal = torch.fft.rfft(input, n).permute(2, 0, 1)  # (frequency, B, C)
        kernel = torch.fft.rfft(self.weight, n).conj().permute(2, 1, 0)  # (frequency, C, C')
        out = torch.fft.irfft((signal @ kernel).permute(1, 2, 0), n)[..., : n - taps + 1]
        return out if self.bias is None else out + self.bias[:, None]


def with_long_convolutions(network: nn.Module) -> nn.Module:
    """Replace every Conv1d of 48 taps or more by a LongConv1d that shares its parameters, and return the network.

    Names in the state dict do not change.

    >>> from paper.networks import SpirometryCNN
    >>> network = SpirometryCNN(n_blocks=2, channels=2)
    >>> before = list(network.state_dict())
    >>> list(with_long_convolutions(network).state_dict()) == before, type(network.blocks[0].conv).__name__
    (True, 'LongConv1d')
    """
    for name, module in list(network.named_modules()):
        for key, child in list(module.named_children()):
            if type(child) is nn.Conv1d and child.kernel_size[0] >= LONG:
                setattr(network.get_submodule(name), key, LongConv1d.of(child))
    return network
