"""The paper's 1-D CNN, trained to predict the FEV₁ of a visit from a curve with coughs, with wide or narrow kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Adam

from paper.long_convolution import with_long_convolutions
from paper.networks import SpirometryCNN
from paper.options import Options, machine
from paper.spirometry import Spirograms
from paper.training import Checkpoint, Recipe, mean_score, squared_error, train, warm_cosine
from smoothhess.model.weight_files import load_weights, save_weights

__all__ = ["NARROW", "WIDE", "Fitted", "fitted", "linear_mse", "recalibrate", "recipe"]

WIDE = 200  # taps, as printed: 10 s
NARROW = 10  # taps: 0.5 s; the paper does not print its narrow width. Ten blocks see 91 samples, 4.5 s
BATCH, RATE = 64, 1e-3
CALIBRATION = 2_048  # training curves from which the batch-norms take their means and variances


class FullPrecisionCNN(SpirometryCNN):
    """A CNN in float32: the bfloat16 of the trainer on a GPU is too coarse for errors of a hundredth of a litre."""

    def forward(self, x: Tensor) -> Tensor:
        """The predicted number, (B, 1)."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


@dataclass(frozen=True, eq=False)
class Fitted:
    """A trained network in eval mode and its errors, mean squared, in L²."""

    network: nn.Module
    kernel: int  # taps
    n_steps: int
    mse: float  # on the test curves
    train_mse: float
    uncalibrated_mse: float  # on the test curves, before the batch-norms were calibrated
    variance: float  # of the test FEV₁: the error of predicting the mean
    machine: str = ""  # on which it was trained; empty if unknown

    @property
    def r2(self) -> float:
        """Share of the test variance that is explained."""
        return 1 - self.mse / self.variance

    @property
    def words(self) -> str:
        """Kernel, steps and error, for captions."""
        return f"kernel {self.kernel}, {self.n_steps} steps, test MSE {self.mse:.3g} L², R² {self.r2:.3f}"


def recipe(n_steps: int) -> Recipe:
    """Adam with warm-up and cosine decay; the paper states only the loss, mean squared error.

    >>> recipe(2_000).rate(200)
    0.001
    """
    rate = warm_cosine(RATE / 10, RATE, RATE / 100, n_steps // 10, n_steps)
    return Recipe(n_steps, BATCH, Adam, rate, lambda y, fev1: squared_error(y, fev1).mean(), squared_error)


def fitted(spirograms: Spirograms, kernel: int, n_steps: int, options: Options) -> Fitted:
    """Return the network trained on four fifths of the curves, or the one stored in `options.weights`.

    An interrupted training resumes from its last checkpoint, one of which is written every 100 steps.
    """
    learn, test = spirograms.split()
    variance = float(test.fev1.double().var(unbiased=False))
    name = f"spirometry-{spirograms.source.split()[0].lower()}-{len(spirograms)}-kernel-{kernel}"
    path = options.weights / f"{name}-{n_steps}-steps-seed-{options.seed}.safetensors"
    with torch.random.fork_rng(devices=[]):  # layers draw their initial weights from the global generator
        torch.manual_seed(options.seed)
        network = with_long_convolutions(FullPrecisionCNN(kernel=kernel))
    if path.exists():
        notes = load_weights(network, path)
        numbers = {key: float(notes[key]) for key in ("mse", "train_mse", "uncalibrated_mse")}
        known = {**numbers, "variance": variance}
        network.to(options.device).eval()
        return Fitted(network, kernel, int(notes["steps"]), **known, machine=notes.get("machine", ""))
    checkpoint = Checkpoint.of(path, every=100)
    training = train(
        network,
        learn.as_split(),
        recipe(n_steps),
        held_out={"test": test.as_split()},
        seed=options.seed,
        checkpoint=checkpoint,
        device=options.device,
        show_progress=options.show_progress,
    )
    recalibrate(network, learn.curves[:CALIBRATION])
    result = Fitted(
        network,
        kernel,
        training.n_steps,
        mse=mean_score(network, test.as_split(), squared_error),
        train_mse=mean_score(network, learn.as_split(), squared_error),
        uncalibrated_mse=training.scores["test"],
        variance=variance,
        machine=machine(options.device),
    )
    _keep(result, path, options.seed)
    checkpoint.path.unlink(missing_ok=True)
    return result


def linear_mse(spirograms: Spirograms, ridge: float = 0.01) -> float:
    """Test error of a linear regression of FEV₁ on the volumes, in L²: the error without any interaction."""
    (x, y), (test_x, test_y) = (
        (torch.nn.functional.pad(part.curves.double(), (0, 1), value=1.0), part.fev1.double())
        for part in spirograms.split()
    )
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x.T @ y)
    return float((test_x @ weights - test_y).square().mean())


def _keep(result: Fitted, path: Path, seed: int) -> None:
    save_weights(
        result.network,
        path,
        run="spirometry",
        seed=str(seed),
        kernel=str(result.kernel),
        steps=str(result.n_steps),
        mse=repr(result.mse),
        train_mse=repr(result.train_mse),
        uncalibrated_mse=repr(result.uncalibrated_mse),
        machine=result.machine,
    )


@torch.no_grad()
def recalibrate(network: nn.Module, curves: Tensor, batch_size: int = 256) -> None:
    """Set the means and variances of all batch-norms to those of `curves` without dropout.

    During training, dropout increases the variance of the inputs of each batch-norm; in eval mode there is no dropout,
    and the difference, accumulated over ten blocks, shifts the output. Parameters and layers do not change.
    """
    device = next(network.parameters()).device
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
    for batch in curves.split(batch_size):
        network(batch.to(device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()
