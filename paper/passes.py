"""Forward and backward pass of a training step; on a GPU recorded once and replayed.

A deep network launches thousands of small kernels in a step, and launching them one by one takes longer than running
them. A CUDA graph launches all of them at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Passes"]

WARM_STEPS = 3  # steps that are run without a graph before one is recorded


class Passes:
    """Loss of a batch; its gradients replace those of the last batch in the parameters' .grad.

    On CUDA the network runs in bfloat16, and batches of `size` examples are replayed: the network must do the same for
    every batch, and never wait for the device (`.item()`, `nonzero`).

    >>> network = nn.Linear(2, 1)
    >>> passes = Passes(network, nn.functional.mse_loss, size=4)
    >>> loss = passes(torch.ones(4, 2), torch.zeros(4, 1))
    >>> loss.requires_grad, network.weight.grad.shape
    (False, torch.Size([1, 2]))
    """

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], size: int) -> None:
        self.network, self.loss, self.size = network, loss, size
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        for (
            parameter
        ) in network.parameters():  # also of frozen ones: an optimiser would use gradients that are left there
            parameter.grad = None
        self.on_cuda = any(p.is_cuda for p in self.parameters)
        self.run = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss, (), without its graph."""
        if not self.on_cuda or len(inputs) != self.size or self.run < WARM_STEPS:
            self.run += 1
            return self._run(inputs, targets)
        if self.graph is None:
            self._record(inputs, targets)
        assert self.graph is not None
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.found.clone()

    def _run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_cuda):
            loss = self.loss(self.network(inputs), targets)
        loss.backward()
        return loss.detach()

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        device = inputs.device
        with torch.cuda.device(device):  # a graph that is recorded on another device than the current one is empty
            self.inputs, self.targets = inputs.clone(), targets.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                self.found = self._run(self.inputs, self.targets)
        self.gradients = [parameter.grad for parameter in self.parameters]
        self.graph = graph
