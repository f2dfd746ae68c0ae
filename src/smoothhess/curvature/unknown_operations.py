"""Find operations of a forward pass that could change the gradient where no sampled draw did.

If no gradient changed in a run, or all of them are those of a quadratic function, a rare kink may have been missed. If
every recorded operation is smooth, there is no kink to miss. Gradients that did not change at all need more than that,
polynomial operations: in floating point the gradient of a saturated tanh or softmax is constant. Operations are
recorded below autograd, so functions, modules, methods and scripted code are all included. Operations that are not
listed here count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from smoothhess.model.operator_mode import OperatorMode
from smoothhess.model.state import is_opaque

# Names of aten operators, without namespace and overload, that are polynomial in each argument or rearrange numbers.
_POLYNOMIAL = """
add sub rsub mul neg addcmul lerp mm bmm mv dot addmm addmv addbmm baddbmm linear matmul einsum outer
_trilinear mse_loss cumprod linalg_cross linalg_det _linalg_det where masked_fill scatter_add index_put _index_put_impl
unfold im2col col2im reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d upsample_linear1d
upsample_bicubic2d upsample_trilinear3d pixel_unshuffle unsafe_split unsafe_chunk _conj nll_loss_forward
nll_loss2d_forward convolution _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
bilinear mkldnn_convolution _mkldnn_linear mkldnn_linear view _unsafe_view reshape _reshape_alias as_strided t transpose
permute flatten unflatten expand expand_as repeat repeat_interleave squeeze unsqueeze cat stack split
split_with_sizes chunk unbind slice select narrow diagonal index_select gather index flip roll constant_pad_nd
clone contiguous alias detach lift_fresh lift_fresh_copy _to_copy copy copy_ to zeros zeros_like ones ones_like
full full_like empty empty_like new_zeros new_ones new_full empty_strided new_empty_strided arange scalar_tensor
eye tril triu sum mean cumsum var prod square
native_batch_norm batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm
_batch_norm_impl_index avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d
upsample_bilinear2d pixel_shuffle embedding embedding_renorm fft_fft fft_rfft _fft_r2c _fft_c2c _fft_c2r view_as_real
view_as_complex real imag
"""
POLYNOMIAL = frozenset(_POLYNOMIAL.split())

# Operators that have derivatives of all orders (where they are defined), but may saturate.
_SMOOTH = """
div reciprocal var_mean exp exp2 expm1 log log1p log2 log10 rsqrt sin cos tan sinh cosh atan asinh tanh
sigmoid erf erfc gelu silu mish log_sigmoid log_sigmoid_forward lgamma digamma _softmax softmax _log_softmax
log_softmax _safe_softmax softplus glu logsumexp logaddexp binary_cross_entropy_with_logits
native_layer_norm layer_norm native_group_norm
mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math
"""
SMOOTH = frozenset(_SMOOTH.split())

# Operators whose kinks the closed form includes, see smoothhess.curvature.activation_hooks.
_KINKED = """
relu relu6 leaky_relu prelu _prelu_kernel hardtanh clamp clamp_min clamp_max threshold abs elu
"""
KINKED = frozenset(_KINKED.split())


class _Recorder(OperatorMode):
    """Records the names of all operators whose arguments may depend on the input.

    Masks and positions that a model computes in each call do not depend on it: none of the arguments has a gradient, or
    shares memory with the result of an operator whose arguments have one, such as a detached copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.kinked = 0  # calls of KINKED operators
        self._dependent: dict[int, Any] = {}  # memory by address; it is kept, so that no other tensor gets its address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        found = func(*args, **(kwargs or {}))
        given = list(_tensors((*args, *(kwargs or {}).values())))
        if not any(t.requires_grad or _address(t) in self._dependent for t in given):
            return found
        # masks, positions and weights that are combined with the input stay independent of it
        given = [t for t in given if t.requires_grad or _address(t) in self._dependent]
        self._dependent |= {_address(t): t.untyped_storage() for t in (*given, *_tensors((found,)))}
        if namespace != "aten" or "mode" in func._schema.overload_name:  # such as division with rounding
            name = str(func)
        elif _rounds(name, args, found):
            name = "conversion to integers"
        elif (name.rstrip("_") == "div" and not _varies(args[1])) or (name.rstrip("_") == "pow" and _is_power(args[1])):
            name = "mul"
        name = name.rstrip("_")  # in-place operators have an underscore
        self.names.add(name)
        self.kinked += name in KINKED
        return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Reader(TorchFunctionMode):
    """Records that numbers of floating-point tensors are read by code outside of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READERS and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.reads = True
        return func(*args, **(kwargs or {}))


READERS = {"tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}


def _rounds(name: str, args: tuple[Any, ...], found: Any) -> bool:
    """Whether an operator converts floating-point numbers to integers."""
    if name == "_to_copy":
        return args[0].is_floating_point() and not (found.is_floating_point() or found.is_complex())
    return name == "copy_" and args[1].is_floating_point() and not (found.is_floating_point() or found.is_complex())


def _varies(divisor: Any) -> bool:
    """Whether a divisor may depend on the input."""
    return isinstance(divisor, Tensor) and divisor.requires_grad


def _is_power(exponent: Any) -> bool:
    """Whether an exponent is a number 0, 1, 2, …"""
    return isinstance(exponent, int | float) and exponent >= 0 and exponent == int(exponent)


def unknown_operations(forward: Callable[[Tensor], Any], inputs: Tensor, model: Any) -> list[str]:
    """Names of the operations of one forward pass that are not polynomial, and so may have a kink or saturate, sorted.

    `model` is the model of the user, which `forward` calls. Compiled code and functions with a custom backward pass
    cannot be inspected and count as unknown.

    >>> unknown_operations(lambda x: x.prod(1) + x.square().sum(1) / 2, torch.ones(1, 2), None)
    []
    >>> unknown_operations(lambda x: x.relu().sum(1), torch.ones(1, 2), None)
    ['relu']
    """
    return operations(forward, inputs, model).unknown


class Operations(NamedTuple):
    """Operations of one forward pass."""

    unknown: list[str]  # names of those that are not polynomial
    kinked: int  # number of calls of KINKED operators


def operations(forward: Callable[[Tensor], Any], inputs: Tensor, model: Any) -> Operations:
    """`unknown_operations`, and the number of calls whose kinks the closed form may include."""
    if is_opaque(model):
        return Operations(["a compiled module"], 0)
    leaf = inputs.detach().requires_grad_()
    with torch.enable_grad(), _Reader() as reader, _Recorder() as recorder:
        output = forward(leaf)
    found = {n for n in recorder.names if n not in POLYNOMIAL}
    if reader.reads:
        found.add("numbers that are read outside of torch")
    if not isinstance(output, Tensor) or output.grad_fn is None:
        return Operations(sorted(found | {"an output without a gradient"}), recorder.kinked)
    own, passed = _behind(output.grad_fn)
    # activations that the output does not depend on, such as layers after a neuron, are ignored
    unknown = sorted({n for n in found if n not in KINKED or n.replace("_", "") in passed} | own)
    return Operations(unknown, recorder.kinked)


def _behind(node: Any) -> tuple[set[str], set[str]]:
    """Names of the functions between an output and its inputs: those with a custom backward pass, and all others."""
    seen, stack, found, passed = set(), [node], set(), set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.add(type(node).__name__)
        else:
            passed.add(type(node).__name__.partition("Backward")[0].lower())
        stack.extend(parent for parent, _ in node.next_functions)
    return found, passed
