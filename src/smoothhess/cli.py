"""The command line: `smoothhess explain`, `smoothhess demo` and `smoothhess reproduce`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

FAILED, INTERRUPTED = 2, 130  # exit codes; the second is what shells use for Ctrl-C


def demo(*, out: Path = Path("smoothhess-demo"), seed: int = 0) -> None:
    """Train two small ReLU networks and show which features act together in them.

    Handwritten digits (8×8 pixels) and breast cancer (30 named columns), both from scikit-learn; nothing is downloaded.
    Prints the strongest pairs with 95 % intervals; saves an interactive page of each, figures and results. Takes less
    than a minute.

    Args:
        out: Folder for pages (html), figures (png) and results (safetensors). Files of an earlier run are replaced.
        seed: Decides the split into training and test, the first weights and the noise. Same seed, same numbers.
    """
    if seed < 0 or seed >= 2**32:
        raise ValueError(f"--seed must be between 0 and 2³² − 1, got {seed}.")
    print("smoothhess demo: loading the data and training two small networks", flush=True)
    from smoothhess import demonstration

    demonstration.run(out, seed)


def reproduce(
    name: Literal[
        "surface",
        "four-quadrant",
        "nested",
        "pmse",
        "pmse-resnet101",
        "attack",
        "spirometry",
        "superpixels",
        "all",
    ],
    /,
    *,
    data: Path | None = None,
    out: Path = Path("smoothhess-reproduction"),
    device: str | None = None,
    quick: bool = False,
    points: int | None = None,
    seed: int = 0,
    dataset: Literal["mnist", "fmnist", "cifar10"] | None = None,
    function: Literal["logit", "neuron"] | None = None,
    cache: Path | None = None,
    steps: int | None = None,
) -> None:
    """Make a table or a figure of the paper again, beside the published numbers.

    Tables are written as csv and Markdown, figures as png and svg. Whatever is finished is on disk: the same command
    goes on where a stopped one was.

    Args:
        name: Which experiment.
        data: Folder of the data sets and the given weights; SMOOTHHESS_DATA if not given. The experiments on the plane
            need none.
        out: Folder for the results, one folder in it for each experiment.
        device: cpu, cuda, cuda:1, …; a GPU if there is one.
        quick: Fewer points and short trainings, whose steps and accuracy are told. Minutes on two CPU cores.
        points: Inputs to explain for each cell of a table; as many as in the paper if not given.
        seed: Decides first weights, order of the data and noise. Same seed, same numbers.
        dataset: One data set instead of all.
        function: One function of the network instead of both: the logit of the predicted class, or a neuron.
        cache: Folder for trained weights, to be used again by other runs; in OUT if not given.
        steps: Stop the training of a network on the plane (surface, four-quadrant, nested) after so many steps; shorten
            that of an image classifier to them.
    """
    import torch

    from smoothhess.reproduce.experiments import find
    from smoothhess.reproduce.options import Options
    from smoothhess.view import canvas

    canvas.new_figure(1, 1)  # without matplotlib, say so at once
    options = Options(
        out=out.expanduser(),
        data=data,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        quick=quick,
        points=points,
        seed=seed,
        dataset=dataset,
        function=function,
        cache=cache,
        steps=steps,
        show_progress=sys.stderr.isatty(),
    )
    outcome = find(name)(options)
    print("\n".join(outcome.lines))
    print("\nWritten:\n" + "\n".join(f"  {path}" for path in outcome.files))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments` (those of the process if None); the exit code.

    0: done; 2: an error, told on one line, or with its traceback under --debug; 130: interrupted.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in tokens
    tokens = [token for token in tokens if token != "--debug"]
    try:
        _application()(tokens, exit_on_error=False, print_error=False, result_action="return_none")
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _say(f"error: {_one_line(error)}", FAILED)
    return 0


def _application() -> Any:
    try:
        from cyclopts import App
    except ImportError as error:
        raise ImportError("the command line needs cyclopts: pip install 'smoothhess[cli]'") from error
    from smoothhess import __version__
    from smoothhess.explain.command import explain

    app = App(
        name="smoothhess",
        version=__version__,
        help="Which pairs of features act together inside a neural network, how strongly, and how sure are we?",
        help_epilogue="With --debug, an error shows its traceback. Exit codes: 0 done, 2 error, 130 interrupted.",
        suppress_keyboard_interrupt=False,
    )
    app.command(explain)
    app.command(demo)
    app.command(reproduce)
    return app


def _say(words: str, code: int) -> int:
    print(f"smoothhess: {words}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
