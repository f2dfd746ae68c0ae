"""Taylor-CAM: first- and second-order importance of the channels, or positions, of a layer for an output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.baselines.derivative_source import Derivatives, Source, caution, curvature
from smoothhess.model import targets as targets
from smoothhess.model.gradients import Oracle
from smoothhess.model.layer_functions import Neuron
from smoothhess.model.model_call import ModelCall
from smoothhess.model.state import borrowed
from smoothhess.result.exact import Attribution


def taylor_cam(
    forward_func: Callable[..., Any],
    layer: nn.Module | str,
    inputs: Tensor,
    target: Any = None,
    additional_forward_args: Any = None,
    *,
    dims: int | Sequence[int] = 1,
    of: str | Derivatives = "own",
    internal_batch_size: int | None = None,
    **options: Any,
) -> Attribution:
    """First- and second-order importance of the parts of a layer's output: channels, or positions.

    A gate s_k multiplies every part k of the activation A, and F(s) is the model's output as a function of the gates.
    At s = 1, where all gates are open,

        G_k = ∂F/∂s_k = ⟨A_k, ∂f/∂A_k⟩,   M_kl = ∂²F/∂s_k∂s_l = A_kᵀ (∂²f/∂A_k∂A_l) A_l.

    Closing the gates in S changes the output by −Σ G_k + ½ Σ M_kl over S, to second order: G_k is the effect of part k,
    and M_kl the interaction of two parts. Over positions, dims=(2, 3) of a convolution, G is the map of gradient ×
    activation, which is Grad-CAM if the rest of the model pools; `taylor_map` adds the interactions to it.

    Args:
        forward_func, inputs, target, additional_forward_args, internal_batch_size: see `gradient`.
        layer: the module whose output is gated, or its name; it must run exactly once in a forward pass.
        dims: dimensions of the layer's output (N, …) that have separate gates: 1 for channels, (2, 3) for the positions
            of an image, (1, 2, 3) for all units. Entries along the other dimensions share a gate.
        of: source of the derivatives: "own" (the model; M is zero if the layers after this one are piecewise linear),
            "softplus" or "swish" (the layers after this one softened, with beta=), "smooth" (F smoothed over the gates,
            with sigma= in units of a fully open gate, n_calls=, … of `SmoothHess.attribute`), or a function with the
            signature of the baselines.
        options: passed on to the source that `of` names.

    Returns:
        An Attribution whose features are the gates, with `inputs` all ones: `gradient` is G, the matrix is M, `output`
        is f(x) and `value` is f(x) − F(0), the effect of closing all gates.

    Raises:
        TypeError: if the layer does not return a tensor, or if dims are not ints.
        ValueError: if the layer does not run exactly once, or if dims are not dimensions of its output.

    >>> net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    >>> x = torch.randn(4, 1, 3, 3)
    >>> channels, places = taylor_cam(net, net[0], x, 1), taylor_cam(net, "0", x, 1, dims=(2, 3))
    >>> channels.hessian.shape, places.gradient.shape, taylor_map(places).shape
    (torch.Size([4, 3, 3]), torch.Size([4, 2, 2]), torch.Size([4, 2, 2]))
    """
    call = ModelCall(forward_func, inputs, target, additional_forward_args, internal_batch_size)
    inputs, target, source, rows = call.inputs, call.target, Source.ensure(of, options), internal_batch_size
    module = Neuron(forward_func, layer, 0).layer
    oracle = Oracle(forward_func, inputs, None, additional_forward_args, rows)
    everyone = torch.arange(len(inputs), device=inputs.device)
    with borrowed(forward_func, inputs.device), torch.no_grad():
        (activation,) = oracle.in_batches(
            lambda points, owner: (_output(oracle.bound(owner), module, points),), inputs, everyone, cautious=False
        )
    kept = _check_dims(dims, activation)
    gates = activation.new_ones(len(inputs), *(activation.shape[i] for i in kept))
    gated, args = _gated(forward_func, module, kept), (activation, inputs, *oracle.args)
    found = source(gated, gates, target, args, internal_batch_size=rows)
    with borrowed(forward_func, inputs.device):
        closed = Oracle(gated, gates, target, args, rows).values(torch.zeros_like(gates), everyone)
    result = Attribution.make(
        gates,
        found.output,
        found.gradient,
        **curvature(found),
        value=found.output - closed,
        target=targets.entries(target, len(inputs)),
        n_passes=found.n_passes + 1,
        n_calls=found.n_calls,
        gradient_stderr=found.gradient_stderr,
        relative_error=found.relative_error,
        seed=found.seed,
        method=f"Taylor-CAM, {source.name}",
    )
    first, second = (part.flatten(1).sum(1).mean() for part in (result.gradient, taylor_map(result)))
    note = (
        f"closing all gates lowers the output by {float(result.value.mean()):.3g} ({float(first):.3g} to first order, "
        f"{float(second):.3g} to second), mean over examples{caution(found.relative_error)}"
    )
    return replace(result, note=note)


def taylor_map(result: Attribution) -> Tensor:
    """The contribution of each gate to second order, G − ½ M1, which splits interactions equally between two gates.

    Args:
        result: a result of `taylor_cam`.

    Returns:
        The contributions, (B, *gates), which sum to the second-order estimate of f(x) − F(0). With gates over the
        positions of an image this is a saliency map.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Flatten())
    >>> found = taylor_cam(lambda x: net(x).square().sum(1), net[0], torch.ones(1, 2))
    >>> bool(torch.allclose(taylor_map(found).sum(1), found.value))  # F is quadratic, so the estimate is exact
    True
    """
    ones = torch.ones_like(result.gradient)
    return result.gradient - (result @ ones) / 2


def _output(forward: Callable[[Tensor], Any], layer: nn.Module, points: Tensor) -> Tensor:
    """Output of the layer in a forward pass, (N, …)."""
    seen: list[Any] = []
    with _watching(layer, lambda output: seen.append(output) or output):
        forward(points)
    if len(seen) != 1:
        raise ValueError(
            f"the layer must run once in a forward pass, it ran {len(seen)} times. "
            + ("Is it part of this model?" if not seen else "Wrap the call that you mean in a separate module.")
        )
    if not seen[0].is_floating_point() or len(seen[0]) != len(points) or seen[0].ndim < 2:
        raise ValueError(
            f"the layer must return floating point activations with one row per input, ({len(points)}, …), got "
            f"{tuple(seen[0].shape)} of {seen[0].dtype}. Pass another layer."
        )
    return seen[0].detach().clone()  # a later operation may modify it in place


def _gated(forward_func: Callable[..., Any], layer: nn.Module, dims: Sequence[int]) -> Callable[..., Any]:
    """F: the model as a function of gates (N, *sizes), the gated activation, and the model's arguments."""

    def gated(gates: Tensor, activation: Tensor, *args: Any) -> Any:
        sizes = [size if i in dims else 1 for i, size in enumerate(activation.shape)]
        scaled = activation * gates.reshape(len(gates), *sizes[1:])
        with _watching(layer, lambda _: scaled):
            return forward_func(*args)

    return gated


@contextmanager
def _watching(layer: nn.Module, act: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the layer's output, or the first tensor of a tuple, by `act` of it."""

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return act(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (act(output[0]), *output[1:])
        raise TypeError(
            f"the layer must return a tensor (or a tuple that begins with one), got {type(output).__name__}. Pass "
            "another layer."
        )

    handle = layer.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def _check_dims(dims: Any, activation: Tensor) -> tuple[int, ...]:
    """The dimensions of the activation that have separate gates, ascending."""
    given = dims if isinstance(dims, tuple | list) else (dims,)
    if not given or not all(hasattr(i, "__index__") and not isinstance(i, bool) for i in given):
        raise TypeError(f"dims must be an int or a tuple of them, dimensions of the layer's output, got {dims!r}.")
    n = activation.ndim
    kept = tuple(sorted({int(i) % n if -n <= i < n else n for i in given}))
    if len(kept) != len(given) or kept[0] < 1 or kept[-1] >= n:
        raise ValueError(
            f"dims must name different dimensions of the layer's output {tuple(activation.shape)} after the first, "
            f"1 to {n - 1}, got {dims!r}."
        )
    return kept
