"""The paper's 1-D CNN, trained to predict the FEV₁ of a visit from a curve with coughs, with wide or narrow kernels."""

from __future__ import annotations

from collections.abc import Sequence
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

__all__ = [
    "NARROW",
    "WIDE",
    "Fitted",
    "Regression",
    "fitted",
    "recalibrate",
    "recipe",
    "ridge_regression",
    "squared_errors",
]

WIDE = 200  # taps, as printed: 10 s
NARROW = 10  # taps: 0.5 s; the paper does not print its narrow width. Ten blocks see 91 samples, 4.5 s
BATCH, RATE = 64, 1e-3
DROPOUT = 0.1  # the paper's is 0.5, with which 2 400 steps leave the test error near that of a linear regression
PENALTIES = tuple(10.0**k for k in range(-4, 5))  # L², candidates of the ridge regression
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
    seed: int  # of its initial weights and of the order of the data
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
        made = f"kernel {self.kernel}, seed {self.seed}, {self.n_steps} steps"
        return f"{made}, test MSE {self.mse:.3g} L², R² {self.r2:.3f}"


def recipe(n_steps: int) -> Recipe:
    """Adam with warm-up and cosine decay; the paper states only the loss, mean squared error.

    >>> recipe(2_000).rate(200)
    0.001
    """
    rate = warm_cosine(RATE / 10, RATE, RATE / 100, n_steps // 10, n_steps)
    return Recipe(n_steps, BATCH, Adam, rate, lambda y, fev1: squared_error(y, fev1).mean(), squared_error)


@dataclass(frozen=True, eq=False)
class Regression:
    """A linear regression of FEV₁ on the volumes: a prediction without any interaction."""

    penalty: float  # L², of the squared weights
    errors: Tensor  # (n,) L², squared, of the test curves

    @property
    def mse(self) -> float:
        """Mean squared error on the test curves, L²."""
        return float(self.errors.mean())


def fitted(spirograms: Spirograms, kernel: int, n_steps: int, options: Options, *, seed: int | None = None) -> Fitted:
    """Return the network trained on four fifths of the curves, or the one stored in `options.weights`.

    `seed`, if given, replaces that of the options for the network; the curves are the same. An interrupted training
    resumes from its last checkpoint, one of which is written every 100 steps.
    """
    seed = options.seed if seed is None else seed
    learn, test = spirograms.split()
    variance = float(test.fev1.double().var(unbiased=False))
    data = f"{spirograms.source.split()[0].lower()}-{len(spirograms)}-version-{spirograms.version}-seed-{options.seed}"
    path = options.weights / f"spirometry-{data}-kernel-{kernel}-{n_steps}-steps-seed-{seed}.safetensors"
    with torch.random.fork_rng(devices=[]):  # layers draw their initial weights from the global generator
        torch.manual_seed(seed)
        network = with_long_convolutions(FullPrecisionCNN(kernel=kernel, dropout=DROPOUT))
    if path.exists():
        notes = load_weights(network, path)
        numbers = {key: float(notes[key]) for key in ("mse", "train_mse", "uncalibrated_mse")}
        known = {**numbers, "variance": variance}
        network.to(options.device).eval()
        return Fitted(network, kernel, int(notes["steps"]), seed, **known, machine=notes.get("machine", ""))
    checkpoint = Checkpoint.of(path, every=100)
    training = train(
        network,
        learn.as_split(),
        recipe(n_steps),
        held_out={"test": test.as_split()},
        seed=seed,
        checkpoint=checkpoint,
        device=options.device,
        show_progress=options.show_progress,
    )
    recalibrate(network, learn.curves[:CALIBRATION])
    result = Fitted(
        network,
        kernel,
        training.n_steps,
        seed,
        mse=mean_score(network, test.as_split(), squared_error),
        train_mse=mean_score(network, learn.as_split(), squared_error),
        uncalibrated_mse=training.scores["test"],
        variance=variance,
        machine=machine(options.device),
    )
    _keep(result, path)
    checkpoint.path.unlink(missing_ok=True)
    return result


def ridge_regression(spirograms: Spirograms, penalties: Sequence[float] = PENALTIES) -> Regression:
    """Regress FEV₁ linearly on the volumes of the curves that the networks are trained on.

    The penalty is the one with the lowest error on the last fifth of these curves; then all of them are used.
    """
    learn, test = spirograms.split()
    early, late = learn.split()
    errors = [float(_ridge_errors(early, late, penalty).mean()) for penalty in penalties]
    best = penalties[errors.index(min(errors))]
    return Regression(best, _ridge_errors(learn, test, best))


def _ridge_errors(learn: Spirograms, test: Spirograms, penalty: float) -> Tensor:
    """The squared errors on `test` of the regression on `learn`, (n,) L²; the intercept is not penalised."""
    curves, fev1 = learn.curves.double(), learn.fev1.double()
    centred = curves - curves.mean(0)
    gram = centred.T @ centred + penalty * torch.eye(curves.shape[1], dtype=curves.dtype)
    weights = torch.linalg.solve(gram, centred.T @ (fev1 - fev1.mean()))
    return ((test.curves.double() - curves.mean(0)) @ weights + fev1.mean() - test.fev1.double()).square()


@torch.no_grad()
def squared_errors(network: nn.Module, curves: Tensor, fev1: Tensor, batch_size: int = 256) -> Tensor:
    """The squared error of each curve, (n,) L², float64 on the CPU."""
    device = next(network.parameters()).device
    outputs = torch.cat([network(batch.to(device))[:, 0].double().cpu() for batch in curves.split(batch_size)])
    return (outputs - fev1.double()).square()


def _keep(result: Fitted, path: Path) -> None:
    save_weights(
        result.network,
        path,
        run="spirometry",
        seed=str(result.seed),
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
