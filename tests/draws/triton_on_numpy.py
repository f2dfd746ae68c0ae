"""The few operations of Triton that the kernel for normal numbers uses, on NumPy: it can be tested without a GPU."""

import sys
from types import SimpleNamespace

import numpy as np

import smoothhess.draws


class Lanes(np.ndarray):
    """One number for each lane of a program."""

    def to(self, dtype, bitcast=False):
        return (self.view(dtype) if bitcast else self.astype(dtype)).view(Lanes)


class Pointer:
    """An array with the places of all lanes."""

    def __init__(self, array, places=0):
        self.array, self.places = array, places

    def __add__(self, places):
        return Pointer(self.array, self.places + places)


class Kernel:
    """A function that is launched for each program, or called by another kernel."""

    program = 0

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            given = [Pointer(a.numpy().reshape(-1)) if hasattr(a, "numpy") else a for a in arguments]
            for Kernel.program in range(*grid):
                self.function(*given)

        return launch


def lanes(numbers, dtype=None):
    return np.asarray(numbers, dtype).view(Lanes)


def load(pointer, mask=None, other=0):
    if mask is None:
        return lanes(pointer.array[pointer.places])
    return lanes(np.where(mask, pointer.array[np.where(mask, pointer.places, 0)], other))


def store(pointer, numbers, mask):
    pointer.array[pointer.places[mask]] = numbers[mask]


def umulhi(a, b):
    return lanes([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)], np.uint64)


def modules():
    """Stand-ins for triton and triton.language, by name."""
    language = SimpleNamespace(
        constexpr=lambda value: value,
        uint64=np.uint64,
        int64=np.int64,
        int32=np.int32,
        float64=np.float64,
        program_id=lambda axis: Kernel.program,
        arange=lambda start, stop: lanes(np.arange(start, stop, dtype=np.int32)),
        full=lambda shape, value, dtype: lanes(np.full(shape, value, dtype)),
        where=lambda *arguments: lanes(np.where(*arguments)),
        min=lambda numbers, axis: numbers.min(axis),
        max=lambda numbers, axis: numbers.max(axis),
        exp=np.exp,
        log=np.log,
        load=load,
        store=store,
        umulhi=umulhi,
    )
    return {"triton": SimpleNamespace(jit=Kernel, language=language), "triton.language": language}


def use(monkeypatch):
    """Import the kernel with the stand-ins, until the end of the test."""
    name = "smoothhess.draws.ziggurat_kernel"
    for module, stand_in in modules().items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    monkeypatch.setitem(sys.modules, name, None)  # the end of the test removes what is imported now
    monkeypatch.setattr(smoothhess.draws, "ziggurat_kernel", None, raising=False)
    del sys.modules[name]
