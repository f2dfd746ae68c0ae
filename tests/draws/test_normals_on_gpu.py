"""Normal numbers on a GPU: NumPy's ziggurat from tables, and the kernel where there is a GPU."""

import math
import warnings

import numpy as np
import pytest
import torch

from smoothhess.draws import normals_on_gpu as module
from smoothhess.draws.designs import Orthogonal
from smoothhess.draws.normals_on_gpu import computes_on, normals_on_gpu, ziggurat
from smoothhess.draws.seeding import generator, states
from tests.draws import triton_on_numpy

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def by_hand(words, count):
    """Numbers of the ziggurat from 64-bit words, as the kernel computes them."""
    inside, width, density = ziggurat()
    words, found = iter(words.tolist()), []

    def uniform():
        return (next(words) >> 11) * 2.0**-53

    while len(found) < count:
        word = next(words)
        strip, sign, bits = word & 255, -1 if word >> 8 & 1 else 1, word >> 9 & (2**52 - 1)
        x = sign * bits * float(width[strip])
        if bits < inside[strip]:
            found.append(x)
        elif strip == 0:
            far, down = 1.0, 0.0
            while 2 * down <= far * far:
                far, down = -0.27366123732975827 * math.log1p(-uniform()), -math.log1p(-uniform())
            found.append((-1 if bits >> 8 & 1 else 1) * (3.6541528853610088 + far))
        elif (density[strip - 1] - density[strip]) * uniform() + density[strip] < math.exp(-0.5 * x * x):
            found.append(x)
    return np.array(found)


def test_tables_reproduce_the_numbers_of_numpy():
    count = 30_000
    numbers = np.random.Generator(np.random.PCG64(3)).standard_normal(count)
    found = by_hand(np.random.PCG64(3).random_raw(2 * count), count)
    assert abs(numbers).max() > 3.66  # the tail occurs
    body = abs(numbers) < 3.65
    np.testing.assert_array_equal(found[body], numbers[body])
    np.testing.assert_allclose(found, numbers, rtol=1e-14)


def test_strips_have_equal_areas():
    _, width, density = ziggurat()
    edge = width * 2.0**52
    areas = edge[1:] * (density[:-1] - density[1:])
    np.testing.assert_allclose(areas, edge[0] * density[255], rtol=1e-12)


@pytest.mark.parametrize(("streams", "count"), [(1, 1), (2, 5), (33, 7), (40, 500)])
def test_the_kernel_gives_the_numbers_of_numpy_on_numpy(monkeypatch, streams, count):
    triton_on_numpy.use(monkeypatch)
    keys = [(2**127 + seed, 2**32 - 1, seed) for seed in range(streams)]
    numbers = np.stack([generator(key).standard_normal(count) for key in keys])
    found = normals_on_gpu(states(keys), count, "cpu").numpy()
    body = abs(numbers) < 3.65
    np.testing.assert_array_equal(found[body], numbers[body])
    np.testing.assert_allclose(found, numbers, rtol=1e-14)
    assert streams < 40 or (~body).any()  # the tail occurs


def test_the_cpu_draws_its_own_numbers():
    assert not computes_on("cpu", 10_000)


def test_a_kernel_that_fails_is_named_in_a_warning(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(module, "normals_on_gpu", broken)
    module._works_on.cache_clear()
    with pytest.warns(RuntimeWarning, match="drawn on the CPU.*no compiler"):
        assert not computes_on("cuda", 1000)
    with warnings.catch_warnings():  # once for each device
        warnings.simplefilter("error")
        assert not computes_on("cuda", 1000)
    module._works_on.cache_clear()


@pytest.mark.parametrize("error", [AssertionError(), OSError("a\nb")])
def test_failures_with_any_message_are_reported(monkeypatch, error):
    monkeypatch.setattr(module, "normals_on_gpu", lambda *_: (_ for _ in ()).throw(error))
    module._works_on.cache_clear()
    with pytest.warns(RuntimeWarning, match=type(error).__name__):
        assert not computes_on("cuda", 1000)
    module._works_on.cache_clear()


def test_running_out_of_memory_is_no_reason_to_give_up_the_kernel(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "normals_on_gpu", full)
    module._works_on.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        computes_on("cuda", 1000)


@on_gpu
def test_the_kernel_gives_the_numbers_of_numpy():
    keys = [(seed, 5) for seed in range(1000)]
    numbers = np.stack([generator(key).standard_normal(3000) for key in keys])
    found = normals_on_gpu(states(keys), 3000, "cuda").cpu().numpy()
    body = abs(numbers) < 3.65
    np.testing.assert_array_equal(found[body], numbers[body])
    np.testing.assert_allclose(found, numbers, rtol=1e-14)
    assert (~body).sum() > 100


@on_gpu
def test_stacked_draws_are_those_of_the_cpu():
    streams = [(seed, 0) for seed in range(300)]
    like = torch.empty(0, dtype=torch.float64)
    cpu = Orthogonal().stacked(streams, 20, 50, like)
    gpu = Orthogonal().stacked(streams, 20, 50, like.cuda())
    for a, b in ((cpu.z, gpu.z), (cpu.score, gpu.score), (cpu.weight, gpu.weight)):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-10, atol=1e-12)
