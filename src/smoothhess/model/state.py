"""Check the state of the user's model before it is called, and restore it afterwards.

Modes of torch (gradients, autocast, TF32) are set here as well; values and gradients are in `gradients`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smoothhess.model.process_flags import tf32

# Layers whose output is random or depends on other rows of the batch in training mode.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def modules_behind(forward_func: Callable[..., Any]) -> list[nn.Module]:
    """Find the modules that a callable uses: itself, its owner, its closure, and globals that it names.

    >>> net = nn.Linear(2, 1)
    >>> modules_behind(lambda x: net(x).sigmoid())
    [Linear(in_features=2, out_features=1, bias=True)]
    """
    found: dict[int, nn.Module] = {}
    pending: list[Any] = [forward_func]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found[id(item)] = item
        elif isinstance(item, functools.partial):
            pending += [item.func, *item.args, *item.keywords.values()]
        elif hasattr(item, "__code__"):
            cells = [c.cell_contents for c in item.__closure__ or () if _is_filled(c)]
            named = [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
            pending += [v for v in cells if callable(v)] + [v for v in named if isinstance(v, nn.Module)]
        elif callable(item) and not isinstance(item, type) and hasattr(item, "__dict__"):  # an object with __call__
            pending += [v for v in vars(item).values() if callable(v) and not isinstance(v, type)]
        pending += [getattr(item, name) for name in ("__self__", "__func__") if hasattr(item, name)]
    return list(found.values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # an empty cell: the variable is not assigned yet
        return False


def uncompiled(forward_func: Callable[..., Any]) -> Callable[..., Any]:
    """The module or function that torch.compile was called with, whose hooks run; any other callable itself."""
    if isinstance(forward_func, nn.Module):
        return forward_func._modules.get("_orig_mod") or forward_func
    return getattr(forward_func, "_torchdynamo_orig_callable", forward_func)


def is_opaque(forward_func: Callable[..., Any]) -> bool:
    """Whether a model, or a module that it uses, is scripted or compiled, so that its calls cannot be intercepted.

    >>> is_opaque(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    False
    """
    if isinstance(forward_func, torch.jit.ScriptFunction) or hasattr(forward_func, "_torchdynamo_orig_callable"):
        return True
    return any(_is_compiled(module) for root in modules_behind(forward_func) for module in root.modules())


def refuse_compiled_layer(forward_func: Callable[..., Any], layer: nn.Module) -> None:
    """Raise ValueError if a layer is inside a compiled or scripted module, where hooks of a later call do not run."""
    for root in modules_behind(forward_func):
        for name, module in root.named_modules():
            if _is_compiled(module) and any(inner is layer for inner in module.modules()):
                raise ValueError(
                    f"the layer is part of {name or 'a model'!r}, which is compiled or scripted: its output cannot be "
                    "replaced. Pass the model as it was before, or compile only modules after the layer."
                )


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or "_orig_mod" in module._modules  # the result of torch.compile(module)
        or getattr(module, "_compiled_call_impl", None) is not None  # after module.compile()
    )


def refuse_training_mode(forward_func: Callable[..., Any]) -> None:
    """Raise ValueError, with the name of the layer, if dropout or batch norm is in training mode."""
    for root in modules_behind(forward_func):
        for name, layer in root.named_modules():
            random = isinstance(layer, _DROPOUTS) and layer.p > 0
            if layer.training and (random or isinstance(layer, _NORMS)):
                raise ValueError(
                    f"layer {name or '(the model)'!r} ({type(layer).__name__}) is in training mode, so f(x) does not "
                    "depend on x only. Call model.eval() first."
                )


def refuse_other_device(forward_func: Callable[..., Any], device: torch.device) -> None:
    """Raise ValueError if all parameters are on another device type than the inputs."""
    for root in modules_behind(forward_func):
        devices = {p.device for p in root.parameters()}
        if devices and all(d.type != device.type for d in devices):
            raise ValueError(
                f"the model is on {sorted(map(str, devices))} but the inputs are on {str(device)!r}. "
                "Move one of them with .to(device)."
            )


class ModelChangedError(ValueError):
    """Parameters of the model were modified while it was evaluated."""


@contextmanager
def borrowed(forward_func: Callable[..., Any], device: torch.device) -> Iterator[None]:
    """Enable gradients, disable autocast and TF32; restore modes and buffers on exit, also on errors.

    The global random generators belong to all threads of the process, and are neither set nor restored. Raises
    ModelChangedError if a parameter was modified meanwhile, such as by a training loop in another thread.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients cannot be taken inside torch.inference_mode(). Leave it, or use torch.no_grad().")
    refuse_training_mode(forward_func)
    refuse_other_device(forward_func, device)
    modules = modules_behind(forward_func)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(tf32(False))
        stack.enter_context(_same_buffers(modules))
        stack.enter_context(_same_parameters(modules))
        yield


@contextmanager
def _same_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Raise ModelChangedError on exit if a parameter was modified in place, as optimisers and load_state_dict do."""
    renormalised = {
        id(layer.weight)
        for root in modules
        for layer in root.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None  # by each forward pass
    }
    before = [
        (name, p, p._version)
        for root in modules
        for name, p in root.named_parameters()
        if not p.is_inference() and id(p) not in renormalised
    ]

    def refuse_changed() -> None:
        changed = [name for name, p, version in before if p._version != version]
        if changed:
            raise ModelChangedError(
                f"{len(changed)} parameter(s) of the model, {changed[0]!r} first, were modified while it was "
                "evaluated, by another thread or in its forward pass: the result would be a mixture of several "
                "models. Explain a copy (copy.deepcopy), or train afterwards."
            )

    try:
        yield
    except Exception as error:  # may be a consequence of the change
        try:
            refuse_changed()
        except ModelChangedError as changed:
            raise changed from error
        raise
    refuse_changed()


@dataclass
class _Loan:
    """The value of a buffer before the first of several concurrent evaluations."""

    buffer: Tensor
    before: Tensor
    borrowers: int = 0
    restored: bool = True  # False if the model was modified meanwhile: its buffers may have been trained as well


_LOANS: dict[int, _Loan] = {}  # by id of the buffer
_LOANS_LOCK = threading.Lock()


@contextmanager
def _same_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore buffers: a model may count calls or update running estimates in them.

    If threads evaluate the same model concurrently, the last one restores the buffers.
    """
    buffers = {id(b): b for root in modules for b in root.buffers()}
    with _LOANS_LOCK:
        loans = [_LOANS.setdefault(key, _Loan(b, b.detach().clone())) for key, b in buffers.items()]
        for loan in loans:
            loan.borrowers += 1
    try:
        yield
    except ModelChangedError:
        for loan in loans:
            loan.restored = False
        raise
    finally:
        with _LOANS_LOCK, torch.no_grad():
            for loan in loans:
                loan.borrowers -= 1
                if not loan.borrowers:
                    del _LOANS[id(loan.buffer)]
                    if loan.restored and not torch.equal(loan.buffer, loan.before):
                        loan.buffer.copy_(loan.before)
