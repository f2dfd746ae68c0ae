"""`python -m paper NAME`: reproduce a table or figure of the paper and compare it with the published numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from smoothhess.cli.main import run


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
    refined: bool = False,
) -> None:
    """Rerun an experiment of the paper, write its tables and figures, and compare them with the published numbers.

    Tables are written as csv and Markdown, figures as png and svg. Finished parts are stored on disk: the same command
    resumes an interrupted run.

    Args:
        name: Which experiment.
        data: Folder of the data sets and the given weights; SMOOTHHESS_DATA if not given. The two-dimensional
            experiments need none.
        out: Folder for the results, one folder in it for each experiment.
        device: cpu, cuda, cuda:1, …; a GPU if there is one.
        quick: Fewer points and short trainings; the steps and the accuracy are printed. Minutes on two CPU cores.
        points: Inputs to explain for each cell of a table; as many as in the paper if not given.
        seed: Determines initial weights, order of the data and noise. The same seed gives the same numbers.
        dataset: One data set instead of all.
        function: One function of the network instead of both: the logit of the predicted class, or a neuron.
        cache: Folder for trained weights, shared with other runs; in OUT if not given.
        steps: Stop the training of a two-dimensional network (surface, four-quadrant, nested) after this many steps;
            shorten that of an image classifier or of a spirometry network to this many steps.
        refined: Train the networks of four-quadrant and nested with Adam and Gauss-Newton steps instead of the
            paper's RMSProp: the same network, loss and examples. The results have a separate folder.
    """
    import torch

    from paper.experiments import find
    from paper.options import Options
    from smoothhess.view.figures import canvas

    canvas.new_figure(1, 1)  # raise at once if matplotlib is missing
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
        refined=refined,
        show_progress=sys.stderr.isatty(),
    )
    outcome = find(name)(options)
    print("\n".join(outcome.lines))
    print("\nWritten:\n" + "\n".join(f"  {path}" for path in outcome.files))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m paper` with `arguments` (those of the process if None) and return the exit code."""
    return run(_application, arguments, "paper")


def _application() -> Any:
    try:
        from cyclopts import App
    except ImportError as error:
        raise ImportError("the command line needs cyclopts: pip install 'smoothhess[cli,view]'") from error
    app = App(
        name="python -m paper",
        version_flags=(),
        help_epilogue="With --debug, an error shows its traceback. Exit codes: 0 done, 2 error, 130 interrupted.",
        suppress_keyboard_interrupt=False,
    )
    app.default(reproduce)
    return app


if __name__ == "__main__":
    sys.exit(main())
