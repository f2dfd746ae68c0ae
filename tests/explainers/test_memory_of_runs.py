"""The memory of `attribute`: batches of examples, and a stated number of bytes per example."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from smoothhess import SmoothHess
from smoothhess.explainers.find_tails import CANDIDATES, STEPS
from smoothhess.linalg import memory
from smoothhess.linalg.memory import ByteLimit

NETWORK = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)).eval()
"""
PEAK = """
import warnings
from pathlib import Path
import torch
from torch import nn
from smoothhess import SmoothHess

warnings.simplefilter("ignore")
torch.set_num_threads(1)
d = 200
NETWORK
x, explainer, peaks = torch.rand(300, d), SmoothHess(net), []
for count in (200, 300):
    result = explainer.attribute(x[:count], radius=1.0, seed=list(range(count)), max_calls=2 * d)
    peaks.append(1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]))
    del result
print((peaks[1] - peaks[0]) / 100 / d**2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak memory of a process is read from /proc")
def test_the_peak_per_example_is_at_most_120_d_squared_bytes():
    # glibc keeps freed blocks below these sizes, and how many differs from run to run
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    code, environment = PEAK.replace("NETWORK", NETWORK), {**os.environ, **limits}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert 20 < float(done.stdout) < 120


@pytest.mark.parametrize("seed", [0, list(range(7))])
@pytest.mark.parametrize("mask", [None, torch.arange(6) // 2])
def test_examples_in_batches_give_the_result_of_all_in_one(monkeypatch, seed, mask):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    x = torch.randn(7, 6).double()

    def explained():
        return SmoothHess(net).attribute(x, sigma=0.5, n_calls=400, seed=seed, feature_mask=mask)

    whole = explained()
    monkeypatch.setattr("smoothhess.explainers.adaptive.PART_MATRICES", ByteLimit(3 * 8 * 36))
    monkeypatch.setattr("smoothhess.explainers.result_warnings.PART_MATRICES", ByteLimit(3 * 8 * 36))
    parts = explained()
    for name in ("hessian", "gradient", "value", "relative_error", "n_eff"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(parts.stderr(), whole.stderr(), rtol=1e-9, atol=1e-10)
    # the search for tail strata evaluates the directions of all inputs of a batch
    assert bool(((parts.n_passes - whole.n_passes).abs() <= 4 * 3 * STEPS * CANDIDATES).all())
    assert (parts.status, parts.control, parts.control_note) == (whole.status, whole.control, whole.control_note)
    assert memory.PART_MATRICES.items(8 * 36, x.device) > 7  # small examples are explained in one batch


def test_a_result_on_another_device_keeps_its_denoised_hessian():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    result = SmoothHess(net).attribute(torch.randn(2, 6).double(), sigma=0.5)
    moved = result.to("cpu")
    assert moved.estimate.cached_denoised.value is not None
    torch.testing.assert_close(moved.hessian, result.hessian)
    torch.testing.assert_close(moved.relative_error, result.relative_error)
