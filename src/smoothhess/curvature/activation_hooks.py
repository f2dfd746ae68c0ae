"""Intercept the activation calls of a forward pass, to replace, record or freeze them.

The network is not modified. A `TorchFunctionMode` intercepts each call of torch, whether it was written as a module, a
function, a method (in-place or not) or an `aten` operator of a `torch.export`ed graph. Calls are numbered in the order
in which they are made, so a module that is used twice is two calls.

Every piecewise linear call is represented as ``f(z) = base + left·z + Σ_j jump_j · relu(z − knot_j)``:

==============================================  ==========  =====================================
call                                            kind        knots (position, jump)
==============================================  ==========  =====================================
relu; clamp, clip, threshold, maximum, max at 0 relu        (0, 1)
leaky_relu                                      leaky_relu  (0, 1 − slope)
prelu                                           prelu       (0, 1 − weight)
hardtanh, relu6                                 hardtanh    (low, 1), (high, −1)
clamp, clip, threshold, maximum, max elsewhere  clamp       (low, 1) and / or (high, −1)
abs                                             abs         (0, 2)
max_pool, adaptive_max_pool (1d, 2d, 3d)        max_pool    none; windows and maxima are kept
amax, max over dimensions                       max_pool    none; the same, with one window
gelu, silu, elu, sigmoid, tanh, softplus, …     smooth      none; the slope is kept
softmax, log_softmax, layer_norm, group_norm    map         none; linearised with all inputs
==============================================  ==========  =====================================

Not intercepted, hence unchanged: kinks from arithmetic (``x * (x > 0)``, `torch.where`), a maximum of two varying
tensors or over all dimensions, activations fused into one operator (attention, LSTM), scripted and compiled code, and
what `torch.utils.checkpoint` recomputes in the backward pass. Products of activations (attention, gates) are not affine
even if they are frozen: f(x + δ) + f(x − δ) = 2 f(x) does not hold for the frozen f.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from smoothhess.curvature.pool_windows import pooled_positions
from smoothhess.model.process_flags import jvp
from smoothhess.model.state import is_opaque

__all__ = ["Call", "FrozenRun", "OtherPathError", "Tape", "freeze", "record", "replace"]

# Piecewise linear calls, with the arguments after the input in the order torch, nn.functional and aten share.
_BENT = {
    "relu": (),
    "relu6": (),
    "abs": (),
    "leaky_relu": ("negative_slope",),
    "prelu": ("weight",),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
    "threshold": ("threshold", "value"),
    "maximum": ("other",),
    "max": ("other",),
}
_SMOOTH = {"gelu", "silu", "mish", "elu", "selu", "celu", "sigmoid", "tanh", "softplus", "log_sigmoid"}
_SMOOTH |= {"hardswish", "hardsigmoid"}  # they have kinks as well, but only their slope is kept
_ANALYTIC = {"gelu", "silu", "mish", "sigmoid", "tanh", "softplus", "log_sigmoid"}
_MAPS = {"softmax", "log_softmax", "layer_norm", "group_norm"}
_POOLS = {f"{adaptive}max_pool{d}d" for d in "123" for adaptive in ("", "adaptive_")}
_SIZES = ("kernel_size", "stride", "padding", "dilation")  # arguments of a pooling call, after the input
_REPLACED = {"relu", "leaky_relu", "prelu", "hardtanh"}

Knots = tuple[tuple[float, float | Tensor], ...]


@dataclass(frozen=True)
class Call:
    """One recorded call, which near `pre` is ``slope·z + offset`` (an offset of None is zero).

    `knots` lists the kinks of a piecewise linear call and the jumps of its slope there, as numbers or as tensors that
    broadcast against `pre`. `slope` is None for "max_pool" (see `indices` and `windows`) and "map". `function` is the
    call as a function of its first argument; `name` is the module of the network that made the call.
    """

    kind: str
    pre: Tensor
    slope: Tensor | None = None
    offset: Tensor | None = None
    knots: Knots = ()
    indices: Tensor | None = None  # of the maxima, in the dimensions that are pooled
    windows: Tensor | None = None  # (windows, positions) in these dimensions, see `pool_windows`
    function: Callable[[Tensor], Any] | None = None
    operator: str = ""  # name of the operator in torch, such as "gelu" for the kind "smooth"
    analytic: bool = False  # whether `function` has derivatives of all orders
    name: str = ""


@dataclass(frozen=True)
class Tape:
    """The calls of one forward pass over `batch` examples, in call order, and the output of the pass."""

    calls: tuple[Call, ...]
    batch: int
    output: Any


@dataclass(frozen=True)
class FrozenRun:
    """The output of a frozen pass, and the input (`pre`) and output (`post`) of each of its calls."""

    output: Any
    pre: tuple[Tensor, ...]
    post: tuple[Tensor, ...]


class OtherPathError(ValueError):
    """The frozen model makes other activation calls than those that were recorded."""


def replace(forward: Callable[..., Any], smooth: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The same network with every relu replaced by `smooth`.

    leaky_relu, prelu, hardtanh and relu6 are sums of relus, and each relu in the sum is replaced. Max-pooling, and
    clamps that are not a relu, are unchanged. A pass without any call to replace raises ValueError.

    >>> relu = nn.ReLU()
    >>> softened = replace(relu, lambda z: functional.softplus(z, beta=4.0))
    >>> softened(torch.tensor([-1.0, 0.0, 1.0])), relu(torch.tensor(-1.0))
    (tensor([0.0045, 0.1733, 1.0045]), tensor(0.))
    """
    _refuse_opaque(forward)

    def replaced(*inputs: Any) -> Any:
        mode = _Replace(smooth)
        with mode:
            output = forward(*inputs)
        if not mode.count:
            raise ValueError(
                "replace wants a network that calls relu, leaky_relu, prelu, relu6 or hardtanh; no such call "
                "was seen. A smooth network needs no replacement; a scripted one must be passed unscripted."
            )
        return output

    return replaced


def record(forward: Callable[..., Any], *inputs: Any) -> Tape:
    """Run the network once, unchanged, and record every activation call.

    The first input has the examples in dimension 0.

    >>> tape = record(nn.ReLU(), torch.tensor([[-1.0, 2.0]]))
    >>> [(call.kind, call.pre, call.slope, call.knots) for call in tape.calls]
    [('relu', tensor([[-1.,  2.]]), tensor([[0., 1.]]), ((0.0, 1.0),))]
    """
    _refuse_opaque(forward)
    mode = _Record()
    with mode, _watched(mode.running):
        output = forward(*inputs)
    return Tape(tuple(mode.calls), inputs[0].shape[0], output)


def freeze(forward: Callable[..., Any], tape: Tape, *inputs: Any) -> FrozenRun:
    """Run the network with every activation replaced by its recorded slope, position of the maximum or linearisation.

    At the recorded inputs, output and gradient are those of the network; elsewhere they are those of its tangent. For
    B recorded examples the inputs have B·n rows, n successive rows for each example. The result is part of one autograd
    graph. Compute a Jacobian-vector product as the difference of two frozen runs: forward-mode differentiation cannot
    be nested with the one that "map" calls use.

    >>> network = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> tape = record(network, torch.tensor([[0.3]]))
    >>> run = freeze(network, tape, torch.tensor([[0.3], [100.3]]))
    >>> torch.equal(run.output[:1], tape.output), run.pre[0].shape
    (True, torch.Size([2, 2]))
    """
    mode = _Freeze(tape)
    with mode:
        output = forward(*inputs)
    if len(mode.pre) != len(tape.calls):
        raise OtherPathError(f"freeze wants the {len(tape.calls)} recorded calls, got {len(mode.pre)}. {_SAME_PATH}")
    return FrozenRun(output, tuple(mode.pre), tuple(mode.post))


_SAME_PATH = "The network must take the same path for every input."


def _refuse_opaque(forward: Callable[..., Any]) -> None:
    if is_opaque(forward):
        raise ValueError(
            "expected a model whose activation calls can be intercepted, got one that is, entirely or in part, "
            "scripted or compiled. Pass the original module."
        )


@dataclass(frozen=True)
class _Reading:
    """An intercepted call of torch: `function(input)`, written to `input` if `inplace`."""

    kind: str
    input: Tensor
    function: Callable[[Tensor], Any]
    inplace: bool = False
    base: float = 0.0
    left: float | Tensor = 0.0
    knots: Knots = ()
    operator: str = ""
    analytic: bool = False
    dims: int = 0  # dimensions of the window of a pooling call, the last ones of `input`
    result: Callable[[Tensor, Tensor], Any] | None = None  # what a pooling call returns, from values and indices
    pooling: dict[str, Any] | None = None  # sizes of the windows; None: adaptive


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Reading | None:
    """Parse a call of a torch function; None if it is not an activation."""
    written = getattr(func, "__name__", "").split(".")[0]  # aten operators are called "relu.default"
    name = written.strip("_").removesuffix("_with_indices")  # relu_ is in-place; F.threshold calls _threshold
    known = name in _BENT or name in _SMOOTH or name in _MAPS or name in _POOLS or name == "amax"
    if not known or written.startswith("__") or "out" in kwargs:
        return None
    options = dict(kwargs)
    if not args:
        args = (options.pop("input", None),)
    if name in ("max", "maximum"):
        args = (*args, options.pop("other")) if "other" in options else args
        if len(args) != 2 or not isinstance(args[1], Tensor):
            return _maximum_over(name, args, options)
        args = args if _constant(args[1]) is not None else args[::-1]  # maximum(0, x)
    z, rest = args[0], args[1:]
    if not isinstance(z, Tensor) or not z.is_floating_point():
        return None
    inplace = options.pop("inplace", False) or written.endswith("_")

    if name == "amax":
        return _maximum_over(name, args, options)
    if name in _POOLS:
        dims, pool = int(name[-2]), getattr(functional, name)
        pair = options.pop("return_indices", name.startswith("adaptive")) or written.endswith("_with_indices")
        indexed = lambda z: pool(z, *rest, **options, return_indices=True)  # noqa: E731
        pooling = None if name.startswith("adaptive") else dict(zip(_SIZES, rest, strict=False)) | options
        result = (lambda *both: both) if pair else (lambda value, _: value)
        return _Reading("max_pool", z, indexed, operator=name, dims=dims, result=result, pooling=pooling)
    if name in _MAPS:
        return _Reading("map", z, lambda z: func(z, *rest, **options), operator=name)
    aten = getattr(torch.ops.aten, name)  # the out-of-place operator
    apply = lambda z: aten(z, *rest, **options)  # noqa: E731
    if name in _SMOOTH:
        return _Reading("smooth", z, apply, inplace, operator=name, analytic=name in _ANALYTIC)
    bend = _bend(name, z, dict(zip(_BENT[name], rest, strict=False)) | options)
    if bend is None:
        return None
    kind, base, left, knots = bend
    return _Reading(kind, z, apply, inplace, base, left, knots, operator=name)


def _maximum_over(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> _Reading | None:
    """A maximum over some dimensions as pooling of one window; None if the examples, in dimension 0, are among them."""
    z, bound = args[0], dict(zip(("dim", "keepdim"), args[1:], strict=False)) | options
    dim = bound.get("dim")
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(z, Tensor) or not z.is_floating_point() or not isinstance(dims, list | tuple) or not dims:
        return None
    reduced = sorted(d % z.dim() for d in dims)
    if reduced[0] == 0:
        return None
    last = (*range(-len(reduced), 0),)

    def indexed(z: Tensor) -> tuple[Tensor, Tensor]:
        value, index = z.flatten(-len(reduced)).max(-1)
        return value[(..., *[None] * len(reduced))], index[(..., *[None] * len(reduced))]

    def result(value: Tensor, index: Tensor) -> Any:
        if bound.get("keepdim"):
            value, index = value.movedim(last, reduced), index.movedim(last, reduced)
        else:
            value, index = value.squeeze(last), index.squeeze(last)
        return value if name == "amax" else torch.return_types.max((value, index))

    return _Reading("max_pool", z.movedim(reduced, last), indexed, operator=name, dims=len(reduced), result=result)


def _bend(name: str, z: Tensor, bound: dict[str, Any]) -> tuple[str, float, float | Tensor, Knots] | None:
    """Kind, base, left and knots of a piecewise linear call, or None if it is not piecewise linear."""
    if name == "relu":
        return "relu", 0.0, 0.0, ((0.0, 1.0),)
    if name == "abs":
        return "abs", 0.0, -1.0, ((0.0, 2.0),)
    if name == "leaky_relu":
        slope = bound.get("negative_slope", 0.01)
        return "leaky_relu", 0.0, slope, ((0.0, 1.0 - slope),)
    if name == "prelu":
        weight = bound["weight"].detach()
        if weight.numel() > 1:
            weight = weight.reshape(-1, *[1] * (z.dim() - 2))  # one per channel, in dim 1
        return "prelu", 0.0, weight, ((0.0, 1.0 - weight),)
    if name in ("relu6", "hardtanh"):
        low, high = (0.0, 6.0) if name == "relu6" else (bound.get("min_val", -1.0), bound.get("max_val", 1.0))
        return "hardtanh", low, 0.0, ((low, 1.0), (high, -1.0))
    if name == "threshold" and bound["threshold"] != bound["value"]:
        return None  # discontinuous
    below = bound.get("min", bound.get("other", bound.get("value")))
    low, high = _constant(below), _constant(bound.get("max"))
    if (low is None) != (below is None) or (high is None) != (bound.get("max") is None) or low is high:
        return None  # a bound that is not constant, or no bound
    if low == 0.0 and high is None:
        return "relu", 0.0, 0.0, ((0.0, 1.0),)
    knots = tuple((knot, jump) for knot, jump in ((low, 1.0), (high, -1.0)) if knot is not None)
    return ("clamp", 0.0, 1.0, knots) if low is None else ("clamp", low, 0.0, knots)


def _constant(bound: Any) -> float | None:
    """The value of a bound: a number, or a constant tensor without gradient; otherwise None."""
    if isinstance(bound, Tensor) and bound.numel() and not bound.requires_grad:
        return float(bound.flatten()[0]) if bool((bound == bound.flatten()[0]).all()) else None
    return float(bound) if isinstance(bound, (int, float)) else None


class _Intercept(TorchFunctionMode):
    """Passes every activation call to `act`; torch disables the mode inside, so there is no recursion."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        reading = _read(func, args, kwargs or {})
        if reading is None:
            return func(*args, **(kwargs or {}))
        return self.act(reading, lambda: func(*args, **(kwargs or {})))

    def act(self, reading: _Reading, original: Callable[[], Any]) -> Any:
        raise NotImplementedError


class _Replace(_Intercept):
    def __init__(self, smooth: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.smooth = smooth
        self.count = 0

    def act(self, reading: _Reading, original: Callable[[], Any]) -> Any:
        if reading.kind not in _REPLACED:
            return original()
        self.count += 1
        z = reading.input.clone() if reading.inplace else reading.input
        if reading.kind == "relu":
            value = self.smooth(z)
        else:
            value = reading.base + reading.left * z
            for knot, jump in reading.knots:
                value = value + jump * self.smooth(z - knot)
        return reading.input.copy_(value) if reading.inplace else value


@contextmanager
def _watched(running: list[nn.Module]) -> Iterator[None]:
    """Maintain a list of the modules that are running in this thread, innermost last."""
    thread = threading.get_ident()

    def enter(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            running.append(module)

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Record(_Intercept):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.running: list[nn.Module] = []

    def name(self) -> str:
        """Name of the innermost running module within the outermost one."""
        if not self.running:
            return ""
        names = {id(module): name for name, module in self.running[0].named_modules()}
        return next((names[id(m)] for m in reversed(self.running) if names.get(id(m))), "")

    def act(self, reading: _Reading, original: Callable[[], Any]) -> Any:
        pre = reading.input.detach().clone()  # the model may overwrite the tensor later
        if reading.kind == "max_pool":
            indices = reading.function(pre)[1]
            windows = pooled_positions(pre.shape[-reading.dims :], indices.shape[-reading.dims :], reading.pooling)
            call = Call("max_pool", pre, indices=indices, windows=windows)
        elif reading.kind == "map":
            call = Call("map", pre, function=reading.function)
        else:
            with torch.enable_grad():  # the slope of autograd, also where pre is at a knot
                z = pre.clone().requires_grad_()
                value = reading.function(z)
                (slope,) = torch.autograd.grad(value.sum(), z)
            offset = value.detach() - slope * pre
            call = Call(reading.kind, pre, slope, offset if offset.any() else None, reading.knots)
            call = dataclasses.replace(call, function=reading.function, analytic=reading.analytic)
        self.calls.append(dataclasses.replace(call, operator=reading.operator, name=self.name()))
        return original()


class _Freeze(_Intercept):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.pre: list[Tensor] = []
        self.post: list[Tensor] = []

    def act(self, reading: _Reading, original: Callable[[], Any]) -> Any:
        z = reading.input.clone()  # unchanged if the model overwrites its tensor
        call = self.counterpart(reading.kind, z)
        if call.indices is not None:
            winners = self.spread(call.indices, call, z)
            value = z.flatten(-reading.dims).gather(-1, winners.flatten(-reading.dims)).view_as(winners)
            assert reading.result is not None
            result = reading.result(value.clone(), winners)  # the model may overwrite the maxima
        elif call.slope is None:
            centre = self.spread(call.pre, call, z).clone()  # an expanded tensor cannot have a tangent
            own, change = jvp(reading.function, centre, z - centre)
            result = value = own + change
        else:
            value = self.spread(call.slope, call, z) * z
            if call.offset is not None:
                value = value + self.spread(call.offset, call, z)
            result = reading.input.copy_(value) if reading.inplace else value
        self.pre.append(z)
        self.post.append(value)
        return result

    def counterpart(self, kind: str, z: Tensor) -> Call:
        """The recorded call that corresponds to the current one."""
        k, calls = len(self.pre), self.tape.calls
        if k == len(calls):
            raise OtherPathError(f"freeze wants the {k} recorded calls, got another {kind}. {_SAME_PATH}")
        then, now = calls[k].pre.shape, z.shape
        grown = [(a, b) for a, b in zip(then, now, strict=False) if a != b]
        divisible = all(b % a == 0 and a % self.tape.batch == 0 for a, b in grown)
        if calls[k].kind != kind or len(then) != len(now) or len(grown) > 1 or not divisible:
            raise OtherPathError(
                f"freeze wants call {k} to be {calls[k].kind} of {tuple(then)} with n rows for each of "
                f"{self.tape.batch} examples, got {kind} of {tuple(now)}. {_SAME_PATH}"
            )
        return calls[k]

    def spread(self, kept: Tensor, call: Call, z: Tensor) -> Tensor:
        """Repeat a recorded tensor for each of the n rows of an example, along the dimension that has grown."""
        for dim, (then, now) in enumerate(zip(call.pre.shape, z.shape, strict=True)):
            if then != now:
                grouped = kept.unflatten(dim, (self.tape.batch, 1, -1))  # -1: rows folded in by a reshape
                sizes = [-1] * grouped.dim()
                sizes[dim + 1] = now // then
                return grouped.expand(sizes).flatten(dim, dim + 2)
        return kept
